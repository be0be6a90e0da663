"""ChatML as pieces of token ids, checked against the checkpoint's own chat template.

<|im_start|>system\\n{system}<|im_end|>\\n<|im_start|>user\\n{user}<|im_end|>\\n<|im_start|>assistant\\n...
Pieces are only ever appended, so an episode of n turns is a prefix of the same episode with n + 1.
"""

import dataclasses
import json
import re
from typing import Any

from agentrl_jax.machine import files
from agentrl_jax.tokens import rendering
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS, IM_END, IM_START

# What `Chat` says, as a template: for exports of tokenizers that came without one.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LONGEST_QUOTE = 500  # characters of what a template renders that an error repeats
Messages = list[dict[str, str]]  # [{'role': 'user', 'content': '...'}, ...]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Token pieces between messages."""

    tokenizer: Any
    start_id: int  # <|im_start|>
    end_id: int  # <|im_end|>

    def episode_prefix(self, system: str, user_start: str) -> list[int]:
        """System message and the opening of the first user message, up to user_start included."""
        head = [self.start_id, *self.tokenizer.encode(f'system\n{system}'), self.end_id]
        return [*head, *self.user_open(user_start)]

    def default_prefix(self, user_start: str) -> list[int]:
        """episode_prefix without a system message of ours: the checkpoint's template may put
        its own there (Qwen2.5's does)."""
        user = [self.start_id, *self.tokenizer.encode(f'user\n{user_start}')]
        template = self.tokenizer.chat_template
        if template is None:
            return user
        rendered = render(template, [message('user', 'U')], self.tokenizer.source)
        ids = tokenize(self.tokenizer, rendered)
        tail = [self.start_id, *self.tokenizer.encode('user\nU'), *self.answer_open('')]
        if ids[-len(tail) :] != tail:
            raise ValueError(
                f'the chat template of {self.tokenizer.source} does not open a conversation in '
                f'ChatML; it renders {_quoted(rendered)}'
            )
        return [*ids[: -len(tail)], *user]

    def user_open(self, user_start: str) -> list[int]:
        """From after the <|im_end|> of an answer into the next user message."""
        encode = self.tokenizer.encode
        return [*encode('\n'), self.start_id, *encode(f'user\n{user_start}')]

    def answer_open(self, prefix: str) -> list[int]:
        """End of the user message, and the answer up to the prefix that is forced on it."""
        encode = self.tokenizer.encode
        return [self.end_id, *encode('\n'), self.start_id, *encode(f'assistant\n{prefix}')]


def build_chat(tokenizer: Any) -> Chat:
    """The pieces; a ValueError if the checkpoint's template words a chat in another way.

    A tokenizer without a template (the project's own) speaks ChatML by definition.
    """
    chat = Chat(tokenizer, tokenizer.special(IM_START), tokenizer.special(IM_END))
    if tokenizer.chat_template is not None:
        _check_template(chat, tokenizer.chat_template)
    return chat


def _check_template(chat: Chat, template: str) -> None:
    """One turn and two turns of the template must be the pieces, token for token."""
    # White space around the texts shows a template that strips them.
    messages = [message('system', ' S\n'), message('user', '\nU\n')]
    pieces = [*chat.episode_prefix(' S\n', '\nU\n'), *chat.answer_open('')]
    _compare(chat.tokenizer, template, messages, pieces)
    messages += [message('assistant', 'A'), message('user', 'V\n')]
    pieces += [*chat.tokenizer.encode('A'), chat.end_id, *chat.user_open('V\n')]
    _compare(chat.tokenizer, template, messages, [*pieces, *chat.answer_open('')])


def keeps_thoughts(template: str, source: str) -> bool:
    """Whether the template (of a source) repeats earlier answers whole, as episodes do.

    Qwen3's leaves out what comes before </think>.
    """
    answer = '<think>t</think><answer>A</answer>'
    messages = [message('user', 'U'), message('assistant', answer), message('user', 'V')]
    return answer in render(template, messages, source)


def _compare(tokenizer: Any, template: str, messages: Messages, pieces: list[int]) -> None:
    rendered = render(template, messages, tokenizer.source)
    if tokenize(tokenizer, rendered) != pieces:
        raise ValueError(
            f'the chat template of {tokenizer.source} is not ChatML as Qwen2.5 speaks it; it '
            f'renders {_quoted(rendered)} instead of '
            f'{_quoted(tokenizer.decode(pieces, show_special=True))}'
        )


def _quoted(text: str) -> str:
    """A text as Python spells it, its end left out where it is long."""
    return repr(text) if len(text) <= LONGEST_QUOTE else f'{text[:LONGEST_QUOTE]!r}...'


def message(role: str, content: str) -> dict[str, str]:
    """One message as chat templates expect it."""
    return {'role': role, 'content': content}


def render(template: str, messages: Messages, source: str = 'this checkpoint') -> str:
    """The template's own text of a conversation, up to where the next answer begins.

    source: where the template is from, for the ValueError of one that fails or has no end.
    """
    try:
        text = rendering.render(template, json.dumps(messages))
        text.encode('utf-8')
        return text
    except rendering.TemplateError as error:
        why = files.in_line(str(error))
        raise ValueError(f'the chat template of {source} fails: {why}') from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f'the chat template of {source} fails: it renders half of a surrogate pair'
        ) from error


def tokenize(tokenizer: Any, rendered: str) -> list[int]:
    """Ids of a rendered conversation whose special tokens are spelled out."""
    spans = re.split('(' + '|'.join(map(re.escape, CHAT_SPECIALS)) + ')', rendered)
    ids = []
    for span in spans:
        ids += [tokenizer.special(span)] if span in CHAT_SPECIALS else tokenizer.encode(span)
    return ids
