"""ChatML as pieces of token ids, checked against the checkpoint's own chat template.

<|im_start|>system\\n{system}<|im_end|>\\n<|im_start|>user\\n{user}<|im_end|>\\n<|im_start|>assistant\\n...
Pieces are only ever appended, so an episode of n turns is a prefix of the same episode with n + 1.
"""

import atexit
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
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
# The same with tools, in Hermes' words, which Qwen2.5 and Qwen3 use too.
CHATML_TOOLS = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if tools %}{{ '<|im_start|>system\n' + system + ('\n\n' if system else '') }}"
    "{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}"
    "{{ 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nFor each function call, return a json object with function name and ' }}"
    '{{ \'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": \' }}'
    '{{ \'<function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n\' }}'
    "{% elif system %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% set role = message['role'] %}"
    "{% if role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif not (loop.first and role == 'system') %}"
    "{{ '<|im_start|>' + role + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or () %}"
    "{% set function = call['function'] %}"
    "{{ '\n' if not loop.first or message['content'] else '' }}"
    "{{ '<tool_call>\n{\"name\": ' + function['name'] | tojson + ', \"arguments\": ' }}"
    "{{ function['arguments'] | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPOILT = '\ue000'  # in the middle of what would be a special token, from its text to its tokens
LONGEST_TEXT = 2**22  # characters of a conversation
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

    def opening(self, messages: Messages, tools: Sequence[dict] = ()) -> list[int]:
        """A conversation from its first token to where the next answer begins, as the template of
        the checkpoint has it. Text of messages and tools is never a special token.

        messages: as chat templates expect them; arguments of tool_calls are objects. Where a
        template knows no tools, conversations with some are worded as CHATML_TOOLS has them.
        """
        return self._tokens(self._rendered(messages, tools))

    def following(self, messages: Messages, tools: Sequence[dict] = ()) -> list[int]:
        """What the template puts between the <|im_end|> of an answer and the next answer, with new
        messages between them: its difference, after an answer of no importance."""
        before = [message('user', 'U'), message('assistant', 'A')]
        known = self._rendered(before, tools, opens=False)
        known = known[: known.rindex(IM_END) + len(IM_END)]
        whole = self._rendered([*before, *messages], tools)
        if not whole.startswith(known):
            raise ValueError(
                f'the chat template of {self.tokenizer.source} changes what stands before new '
                f'messages: {_quoted(whole)} does not begin with {_quoted(known)}'
            )
        return self._tokens(whole[len(known) :])

    def _rendered(self, messages: Messages, tools: Sequence[dict], opens: bool = True) -> str:
        template, called = self.tokenizer.chat_template or CHATML_TOOLS, tools
        called = called or any(one['role'] == 'tool' or 'tool_calls' in one for one in messages)
        if called and 'tools' not in template:  # it would leave calls out without a word
            template = CHATML_TOOLS
        try:
            return _renderer(template).render(
                _spoilt(list(messages)), opens=opens, tools=_spoilt(list(tools)) or None
            )
        except rendering.TemplateError as error:
            why = files.in_line(str(error))
            source = self.tokenizer.source
            raise ValueError(f'the chat template of {source} fails: {why}') from error

    def _tokens(self, rendered: str) -> list[int]:
        return tokenize(self.tokenizer, rendered, whole=lambda text: text.replace(SPOILT, ''))

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


def tokenize(tokenizer: Any, rendered: str, whole: Callable[[str], str] = str) -> list[int]:
    """Ids of a rendered conversation whose special tokens are spelled out.

    whole: of a text between them, what is to be tokenised.
    """
    spans = re.split('(' + '|'.join(map(re.escape, CHAT_SPECIALS)) + ')', rendered)
    ids = []
    for span in spans:
        ids += [tokenizer.special(span)] if span in CHAT_SPECIALS else tokenizer.encode(whole(span))
    return ids


def _spoilt(value: Any) -> Any:
    """A value of JSON in whose texts no special token is spelled: a mark is put into each."""
    if isinstance(value, str):
        value = value.replace(SPOILT, '')
        for special in CHAT_SPECIALS:
            value = value.replace(special, special[:2] + SPOILT + special[2:])
        return value
    if isinstance(value, dict):
        return {_spoilt(key): _spoilt(one) for key, one in value.items()}
    return [_spoilt(one) for one in value] if isinstance(value, list) else value


@functools.cache
def _renderer(template: str) -> rendering.Renderer:
    """That of this process."""
    made = rendering.Renderer(template, LONGEST_TEXT)
    atexit.register(made.close)
    return made
