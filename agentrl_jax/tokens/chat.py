"""Chats as pieces of token ids, checked against the checkpoint's chat template.

<|im_start|>system\\n{system}<|im_end|>\\n<|im_start|>user\\n{user}<|im_end|>\\n<|im_start|>assistant\\n...
or with other markers (wording.py). Pieces are only appended, so an episode of n turns is a prefix
of the same episode with n + 1 turns.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl_jax.machine import files
from agentrl_jax.tokens import rendering
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.tokens.wording import CHAT_ML, LLAMA_3, Wording

# The format of `Chat` as a template, to export tokenizers without one.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# With tools, in the format of Hermes, Qwen2.5 and Qwen3.
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
SPOILT = '\ue000'  # temporarily breaks up special tokens in the text of messages
ANSWER = 'An answer.'  # arbitrary
THOUGHTFUL = '<think>\nt\n</think>\n\nA'
Messages = list[dict[str, str]]  # [{'role': 'user', 'content': '...'}, ...]
GREETING = [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'U'}]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Token pieces between messages."""

    tokenizer: Tokenizer
    start_id: int  # starts a message: <|im_start|>
    end_id: int  # ends a message: <|im_end|>
    wording: Wording = CHAT_ML
    preface: str = ''  # added by the template at the start of a system message
    call_id: int = -1  # token that may announce a call; -1: none
    thought: str = ''  # added by the template in front of each sampled answer: '<think>\n'

    @property
    def begin(self) -> list[int]:
        """Tokens before the first message."""
        begin = self.wording.begin
        return [self.tokenizer.special(begin)] if begin else []

    @property
    def first_id(self) -> int:
        """First token of every conversation."""
        return [*self.begin, self.start_id][0]

    def system_message(self, system: str) -> list[int]:
        """Return a conversation up to the end of its system message."""
        return [*self.begin, *self._opened('system', self.preface + system), self.end_id]

    def episode_prefix(self, system: str, user_start: str) -> list[int]:
        """Return the system message and the start of the first user message, with user_start."""
        return [*self.system_message(system), *self.user_open(user_start)]

    def default_prefix(self, user_start: str) -> list[int]:
        """Return episode_prefix without a system message. The checkpoint's template may add a
        default one (Qwen2.5's does)."""
        user = self._opened('user', user_start)
        template = self.tokenizer.chat_template
        if template is None:
            return user
        rendered = render(self.tokenizer, [message('user', 'U')])
        ids = tokenize(self.tokenizer, rendered)
        tail = [*self._opened('user', 'U'), *self.answer_open(self.thought)]
        if ids[-len(tail) :] != tail:
            raise ValueError(
                f'the chat template of {self.tokenizer.source} does not start a conversation in '
                f'{self.wording.name}; it renders {rendered!r:.500}'
            )
        return [*ids[: -len(tail)], *user]

    def opening(self, messages: Messages, tools: Sequence[dict] = ()) -> list[int]:
        """Render a conversation up to the start of the next answer with the checkpoint's template.

        Texts of messages and tools never become special tokens. messages: as chat templates expect
        them; arguments of tool_calls are objects. If the template does not support tools,
        conversations with tools use CHATML_TOOLS.
        """
        return self._tokens(self._rendered(messages, tools))

    def following(self, messages: Messages, tools: Sequence[dict] = ()) -> list[int]:
        """Return the tokens from after the <|im_end|> of an answer to the start of the next answer.

        They contain the new messages, as the template renders them after a short answer."""
        before = [message('user', 'U'), message('assistant', ANSWER)]
        rendered = self._rendered([*before, *messages], tools)
        _, answered, new = rendered.partition(f'{ANSWER}{self.wording.end}')
        if not answered:
            raise ValueError(
                f'the chat template of {self.tokenizer.source} does not repeat the answer '
                f'{ANSWER!r} unchanged: it renders {rendered!r:.500}'
            )
        return self._tokens(new)

    def _rendered(self, messages: Messages, tools: Sequence[dict]) -> str:
        template, called = self.tokenizer.chat_template or CHATML_TOOLS, tools
        called = called or any(one['role'] == 'tool' or 'tool_calls' in one for one in messages)
        if called and 'tools' not in template:  # it would silently drop calls
            if self.wording.name != CHAT_ML.name:
                raise ValueError(f'the chat template of {self.tokenizer.source} has no tools')
            template = begun(CHATML_TOOLS, self.wording.begin)
        spoilt = functools.partial(_spoilt, specials=self.tokenizer.spelled)
        messages, tools = map_texts(spoilt, [list(messages), list(tools)])
        return render(self.tokenizer, messages, tools=tools or None, template=template)

    def _tokens(self, rendered: str) -> list[int]:
        return tokenize(self.tokenizer, rendered, whole=lambda text: text.replace(SPOILT, ''))

    def user_open(self, user_start: str) -> list[int]:
        """Return the tokens from after the <|im_end|> of an answer into the next user message."""
        return [*self.tokenizer.encode(self.wording.after), *self._opened('user', user_start)]

    def answer_open(self, prefix: str) -> list[int]:
        """Return the end of the user message and the start of the answer with its forced prefix."""
        after = self.tokenizer.encode(self.wording.after)
        return [self.end_id, *after, *self._opened('assistant', prefix)]

    def forced(self, prefix: str) -> str:
        """Return the text before sampled answers: the prefix or the template's '<think>\\n'."""
        return self.thought if prefix in ('', self.thought.strip()) else prefix

    def _opened(self, role: str, text: str) -> list[int]:
        """Return a message up to the end of its text."""
        wording, encode = self.wording, self.tokenizer.encode
        if not wording.role_end:
            return [self.start_id, *encode(f'{role}{wording.space}{text}')]
        role_end = self.tokenizer.special(wording.role_end)
        return [self.start_id, *encode(role), role_end, *encode(wording.space + text)]

    def split_message(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return (role, text) of a message's ids, from after start_id to the end of its text."""
        role, _, text = self.tokenizer.decode(ids).partition(self.wording.space)
        return role, text.removeprefix(self.preface) if role == 'system' else text

    def said(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens except the one for calls."""
        decode = self.tokenizer.decode
        if self.call_id not in ids:
            return decode(ids)
        at = ids.index(self.call_id)
        return decode(ids[:at]) + self.wording.call + decode(ids[at + 1 :])


def build_chat(tokenizer: Tokenizer) -> Chat:
    """Build the pieces; ValueError if the checkpoint's template renders a chat in another way.

    A tokenizer without a template (such as the bundled ones) uses ChatML.
    """
    wording, names = tokenizer.chat_format, tokenizer.special_names()
    preface = thought = ''
    if wording.start not in names:
        raise ValueError(
            f'{tokenizer.source}: unsupported chat format. ChatML needs a special token '
            f'{CHAT_ML.start}, and Llama 3 needs {LLAMA_3.start} in the template'
        )
    if tokenizer.chat_template is not None:
        rendered, bos = render(tokenizer, GREETING), tokenizer.bos
        # SmolLM2's bos_token is the start of a message, and its template does not add another one.
        if bos and rendered.startswith(bos + wording.start):
            wording = dataclasses.replace(wording, begin=bos)
        text_start = wording.role_end + wording.space
        head = f'{wording.begin}{wording.start}system{text_start}'
        system, ended, _ = rendered.partition(f'S{wording.end}')
        if ended and system.startswith(head):
            preface = system.removeprefix(head)
        opened = rendered.rpartition(f'{wording.start}assistant{text_start}')[2]
        thought = opened if opened.startswith('<think>') else ''
    chat = Chat(
        tokenizer,
        start_id=tokenizer.special(wording.start),
        end_id=tokenizer.special(wording.end),
        wording=wording,
        preface=preface,
        call_id=tokenizer.special(wording.call) if wording.call in names else -1,
        thought=thought,
    )
    if tokenizer.chat_template is not None:
        _check_template(chat)
    return chat


def plain_template(begin: str, thought: str) -> str:
    """Return CHATML with the bos_token before conversations and the thought before answers."""
    end = '{% endif %}'
    added = f'{{{{ {json.dumps(thought)} }}}}' if thought else ''
    return begun(f'{CHATML.removesuffix(end)}{added}{end}', begin)


def begun(template: str, begin: str) -> str:
    """Prepend the bos_token to one of our templates if conversations start with it."""
    return f'{{{{ bos_token }}}}{template}' if begin else template


def _check_template(chat: Chat) -> None:
    """Raise ValueError unless the template renders one and two turns as exactly these pieces."""
    # White space around the texts reveals templates that strip them.
    system, user, other = ('S', 'U', 'V') if chat.wording.strips else (' S\n', '\nU\n', 'V\n')
    messages = [message('system', system), message('user', user)]
    pieces, opening = chat.episode_prefix(system, user), chat.answer_open(chat.thought)
    if problem := _difference(chat, messages, [*pieces, *opening]):
        raise ValueError(problem)
    # Templates may add an empty thought to an earlier answer without one.
    problems, pieces = [], [*pieces, *chat.answer_open('')]
    for text, row in (('A', 'A'), ('A', f'{chat.thought}A'), (THOUGHTFUL, THOUGHTFUL)):
        longer = [*messages, message('assistant', text), message('user', other)]
        answer = [*chat.tokenizer.encode(row), chat.end_id, *chat.user_open(other), *opening]
        problems.append(_difference(chat, longer, [*pieces, *answer]))
        if not problems[-1]:
            return
    raise ValueError(problems[0])


def with_tools(tokenizer: Tokenizer, begin: str = '') -> str:
    """Return a template that renders all messages like Chat.opening.

    A template without tools is still used for conversations without calls. begin: see Wording.
    """
    template = tokenizer.chat_template
    if template is None:
        return CHATML_TOOLS
    if 'tools' in template or tokenizer.chat_format != CHAT_ML:
        return template
    return (
        '{% set ns = namespace(called=tools) %}{% for one in messages %}'
        "{% if one['role'] == 'tool' or 'tool_calls' in one %}{% set ns.called = true %}"
        '{% endif %}{% endfor %}{% if ns.called %}'
        f'{begun(CHATML_TOOLS, begin)}{{% else %}}{template.removesuffix(chr(10))}{{% endif %}}'
    )


def keeps_thoughts(tokenizer: Tokenizer) -> bool:
    """Return whether the template keeps the thoughts of earlier answers, as episodes do.

    Qwen3's template drops everything before </think>.
    """
    answer = '<think>t</think><answer>A</answer>'
    messages = [message('user', 'U'), message('assistant', answer), message('user', 'V')]
    return answer in render(tokenizer, messages)


def _difference(chat: Chat, messages: Messages, pieces: list[int]) -> str:
    """Return an error message if the template renders other tokens than the pieces, else ''."""
    tokenizer = chat.tokenizer
    rendered = render(tokenizer, messages)
    if tokenize(tokenizer, rendered) == pieces:
        return ''
    return (
        f'the chat template of {tokenizer.source} is not {chat.wording.name} as supported; '
        f'it renders {rendered!r:.500} instead of '
        f'{tokenizer.decode(pieces, show_special=True)!r:.500}'
    )


def message(role: str, content: str) -> dict[str, str]:
    """Return a message as chat templates expect it."""
    return {'role': role, 'content': content}


def render(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Sequence[dict] | None = None,
    template: str | None = None,
) -> str:
    """Return the text of a conversation up to the start of the next answer.

    template: by default the tokenizer's.
    """
    names = dict(tokenizer.named)
    if begin := tokenizer.bos or tokenizer.chat_format.begin:
        names['bos_token'] = begin
    try:
        return rendering.render(template or tokenizer.chat_template, messages, tools=tools, **names)
    except ValueError as error:
        why = files.one_line_excerpt(str(error))
        raise ValueError(f'the chat template of {tokenizer.source} fails: {why}') from error


def tokenize(tokenizer: Tokenizer, rendered: str, whole: Callable[[str], str] = str) -> list[int]:
    """Tokenise a rendered conversation, in which special tokens are spelled out.

    whole: maps the texts between special tokens before they are tokenised.
    """
    ids = []
    for i, span in enumerate(tokenizer.spelled.split(rendered)):
        ids += [tokenizer.special(span)] if i % 2 else tokenizer.encode(whole(span))
    return ids


def map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Apply a function to all texts of a JSON value, including names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_texts(change, one) for key, one in value.items()}
    return [map_texts(change, one) for one in value] if isinstance(value, list) else value


def _spoilt(text: str, specials: re.Pattern) -> str:
    """Return a text with a mark inside each special token that it spells."""
    text = text.replace(SPOILT, '')
    while specials.search(text):  # they may overlap
        text = specials.sub(lambda found: found[0][0] + SPOILT + found[0][1:], text)
    return text
