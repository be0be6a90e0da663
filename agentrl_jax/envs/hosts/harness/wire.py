"""OpenAI's chat completions: requests and answers.

A client resends a copy of every earlier message. Copies are compared by content (`Said`). These
differences are ignored: white space around a text, the parts of a content, other keys, the JSON
formatting of a call, and a stop string that was cut or added.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from agentrl_jax.envs.hosts.harness import calls
from agentrl_jax.envs.hosts.world import Answer, Sampling

ROLES = {name: name for name in ('system', 'user', 'assistant', 'tool')}
ROLES |= {'developer': 'system', 'function': 'tool'}
TEXTS = ('text', 'input_text', 'output_text', 'refusal')  # types of content parts
# Bookkeeping fields of providers, which do not affect an answer
LABELS = {
    'model', 'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key',
    'prompt_cache_retention', 'request_id', 'cache_salt', 'priority',
}  # fmt: skip
SAMPLING = ('temperature', 'top_p', 'seed')  # supported by a served policy
PLAIN = {  # default values of other fields, which have no effect
    name: values
    for names, values in (
        ('top_k', (-1, 0)),
        ('min_p frequency_penalty presence_penalty min_tokens top_logprobs', (0,)),
        ('repetition_penalty length_penalty best_of', (1,)),
        ('parallel_tool_calls add_generation_prompt skip_special_tokens', (True,)),
        ('spaces_between_special_tokens', (True,)),
        ('echo ignore_eos use_beam_search continue_final_message', (False,)),
        ('include_stop_str_in_output', (False,)),
        ('response_format', ({'type': 'text'},)),
        ('modalities', (['text'],)),
        ('verbosity', ('medium',)),
    )
    for name in names.split()
}
NEVER = {  # fields that are always rejected -> alternative
    'functions': 'send tools instead',
    'function_call': 'send tool_choice instead',
    'continue_final_message': 'the answer is always a new message',
    'echo': 'read the prompt from the request',
    'audio': 'answers are text',
}
EMPTY = (None, '', [], {})  # the same as a missing field
NO_LIMIT = 2**31  # tokens
Limit = Annotated[int, pydantic.Field(ge=1)]
# Keys of messages that are read
KEYS = {'role', 'content', 'tool_calls', 'tool_call_id', 'function_call'}


class Refused(Exception):
    """A rejected request: an HTTP status and OpenAI's error code."""

    def __init__(self, status: int, code: str, sentence: str, param: str | None = None):
        """param: the field at fault."""
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict:
        """The error in OpenAI's format."""
        about = {'type': 'invalid_request_error', 'param': self.param, 'code': self.code}
        return {'error': {'message': str(self)} | about}


@dataclasses.dataclass(frozen=True)
class Said:
    """The content of a message."""

    role: str
    content: str
    calls: str = ''  # JSON of [{name, arguments}]

    @property
    def bare(self) -> 'Said':
        """The content without outer white space, and with sorted keys in calls."""
        calls = json.dumps(json.loads(self.calls), sort_keys=True) if self.calls else ''
        return dataclasses.replace(self, content=self.content.strip(), calls=calls)

    @property
    def message(self) -> dict:
        """The message as chat templates expect it."""
        message = {'role': self.role, 'content': self.content}
        if self.calls:
            calls = json.loads(self.calls)
            message['tool_calls'] = [{'type': 'function', 'function': call} for call in calls]
        return message


class Function(pydantic.BaseModel):
    name: str


class Tool(pydantic.BaseModel):
    type: Literal['function'] = 'function'
    function: Function


class StreamOptions(pydantic.BaseModel):
    include_usage: bool | None = None


class Fields(pydantic.BaseModel):
    """Supported fields of a request; null, '', [] and {} count as missing."""

    model_config = pydantic.ConfigDict(strict=True)

    messages: list[Any] = []
    n: Literal[1] = 1
    tool_choice: Literal['none', 'auto', 'required'] | dict = 'auto'
    tools: list[Tool] = []
    stop: str | list[str] = []
    max_tokens: Limit = NO_LIMIT
    max_completion_tokens: Limit = NO_LIMIT
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    return_token_ids: bool = False
    temperature: Annotated[float, pydantic.Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, pydantic.Field(ge=0, le=1)] | None = None
    seed: Annotated[int, pydantic.Field(ge=-(2**63), le=2**64)] | None = None

    @property
    def token_limit(self) -> int:
        """The smaller of the two token limits; 0 = no limit."""
        limit = min(self.max_tokens, self.max_completion_tokens)
        return 0 if limit == NO_LIMIT else limit


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A parsed request."""

    fields: Fields
    messages: tuple[Said, ...]
    tools: tuple[dict, ...]
    stop: tuple[str, ...]
    model: str
    sampling: Sampling | None  # None: the run's settings
    ignored: tuple[str, ...]  # fields without effect


def invalid(param: str, sentence: str, code: str = 'invalid_request') -> Refused:
    """Return a 400 error for a field."""
    return Refused(400, code, sentence, param)


def read(raw: bytes, stops: Sequence[str], *, serving: bool = False) -> ChatRequest:
    """Parse the body of a request; raise Refused if it is invalid or not supported.

    stops: strings that may end an answer. serving: the request sets temperature, top_p and seed,
    and a field without effect is an error. Otherwise fields without effect are listed in `ignored`.
    """
    try:
        body = calls.read_json(raw)
    except ValueError as error:
        raise Refused(400, 'invalid_json', f'the body is not JSON: {error}') from error
    fields = _fields(body)
    ignored = _check_fields(body, serving)
    messages = tuple(map(read_message, fields.messages))
    if not messages or messages[-1].role == 'assistant':
        raise invalid('messages', 'the last message is from the assistant', 'unsupported_prefill')
    ignored += dict.fromkeys(f'messages.{key}' for key in _unread_keys(fields.messages))
    tools = body['tools'] if fields.tools and fields.tool_choice != 'none' else ()
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if unknown := sorted(set(stop) - set(stops)):
        setting = '--stop' if serving else 'hosts.stop'
        raise invalid('stop', f'{setting} lacks the stop string {unknown[0]!r}', 'unknown_stop')
    sampling = Sampling(fields.temperature, fields.top_p, fields.seed)
    return ChatRequest(
        fields=fields,
        messages=messages,
        tools=tuple(tools),
        stop=stop,
        model=str(body.get('model') or 'policy'),
        sampling=sampling if serving and sampling != Sampling() else None,
        ignored=tuple(ignored),
    )


def _check_fields(body: Mapping, serving: bool) -> list[str]:
    """Return the names of fields without effect; raise Refused for fields in NEVER."""
    ignored = []
    for name, value in body.items():
        used = name in Fields.model_fields and name not in SAMPLING
        if used or name in LABELS or value in EMPTY:
            continue
        plain = PLAIN.get(name, ())
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in plain):
            continue
        if name in NEVER:
            raise invalid(name, f'{name} is not supported: {NEVER[name]}', 'unsupported_field')
        if not (serving and name in SAMPLING):
            ignored.append(name)
    if body.get('tool_choice') not in (*EMPTY, 'none', 'auto'):
        ignored.append('tool_choice')
    if serving and ignored:
        name = ignored[0]
        value = json.dumps(body[name])[:50]
        sentence = f'{name}={value} is not supported: remove it'
        raise invalid(name, sentence, 'unsupported_field')
    return ignored


def _unread_keys(messages: Sequence[Mapping]) -> Iterator[str]:
    for message in messages:
        for key, value in message.items():
            names_tool = key == 'name' and ROLES[message['role']] == 'tool'
            if key not in KEYS and value not in EMPTY and not names_tool:
                yield key


def _fields(body: Any) -> Fields:
    """Validate the typed fields; raise Refused for the first with a wrong type or value."""
    values = body
    if isinstance(body, dict):
        values = {name: value for name, value in body.items() if value not in EMPTY}
    try:
        return Fields.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first['loc'][0]) if first['loc'] else 'messages'
        value = body.get(name) if isinstance(body, dict) else body
        raise invalid(name, f'{name}={value!r:.50} is invalid: {first["msg"]}') from error


def read_message(message: Any) -> Said:
    """Parse a message of a request."""
    role = message.get('role') if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise invalid('messages', f'unknown role in message {message!r:.100}', 'invalid_role')
    entries = message.get('tool_calls') or ()
    if not isinstance(entries, list | tuple):
        raise invalid('messages', 'tool_calls must be a list of objects')
    functions = [one.get('function') if isinstance(one, dict) else one for one in entries]
    if message.get('function_call') is not None:  # older API, before tools
        functions.append(message['function_call'])
    functions = [_call_of(function) for function in functions]
    written = json.dumps(functions, ensure_ascii=False) if functions else ''
    return Said(ROLES[role], text_of(message.get('content')), written)


def text_of(content: Any) -> str:
    """Return the text of a content, which may have parts."""
    if content is None or isinstance(content, str):
        return content or ''
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get('type') if isinstance(part, dict) else type(part).__name__
        text = part.get('text', part.get('refusal')) if kind in TEXTS else None
        if not isinstance(text, str):
            raise invalid('messages', f'unsupported content type {kind!r}', 'unsupported_content')
        texts.append(text)
    return ''.join(texts)


def _call_of(function: Any) -> dict:
    """Return {'name', 'arguments'} of an earlier call; invalid arguments stay text."""
    try:
        return calls.read_call(function)
    except ValueError as error:
        if not isinstance(function, dict) or not isinstance(function.get('name'), str):
            raise invalid('messages', f'invalid function in a call: {function!r:.100}') from error
        if not isinstance(function.get('arguments'), str):
            raise invalid('messages', f'invalid arguments of a call: {error}') from error
        return {'name': function['name'], 'arguments': function['arguments']}


# ---- answers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    body: dict
    forms: tuple[Said, ...]  # how later requests may repeat the answer
    bad_calls: int  # that could not be parsed


def complete(answer: Answer, asked: ChatRequest, name: str) -> Completion:
    """Return the chat.completion of an answer; name: part of the ids of the answer and its calls.

    If a call cannot be parsed, the answer stays text, as in vLLM, and the call is counted.
    """
    full_text = str(answer)
    text = full_text
    for stop in asked.stop:
        text = text.partition(stop)[0]
    before, functions, bad = text, [], 0
    if asked.tools:
        names = {tool['function']['name'] for tool in asked.tools}
        before, functions, bad = calls.find_calls(text, answer.calls, names)
    message: dict[str, Any] = {'role': 'assistant', 'content': text}
    if functions and not bad:
        message['content'] = before.strip() or None
        message['tool_calls'] = [
            {
                'id': f'call_{name}_{number}',
                'type': 'function',
                'function': {
                    'name': call['name'],
                    'arguments': json.dumps(call['arguments'], ensure_ascii=False),
                },
            }
            for number, call in enumerate(functions)
        ]
    forms = [read_message(message)]
    if text != full_text:
        forms += [Said('assistant', text + stop) for stop in asked.stop]
        forms.append(Said('assistant', full_text))
    finish = 'tool_calls' if 'tool_calls' in message else answer.finish
    choice = {'index': 0, 'message': message, 'finish_reason': finish, 'logprobs': None}
    if asked.fields.logprobs:
        pieces = zip(answer.pieces, answer.logprobs, strict=True)
        content = [
            {
                'token': piece.decode('utf-8', 'replace'),
                'bytes': list(piece),
                'logprob': logprob,
                'top_logprobs': [],
            }
            for piece, logprob in pieces
        ]
        choice['logprobs'] = {'content': content, 'refusal': None}
    counts = {'prompt_tokens': len(answer.prompt), 'completion_tokens': len(answer.ids)}
    body = {
        'id': f'chatcmpl-{name}',
        'object': 'chat.completion',
        'created': int(time.time()),
        'model': asked.model,
        'choices': [choice],
        'usage': counts | {'total_tokens': sum(counts.values())},
    }
    if asked.fields.return_token_ids:
        choice['token_ids'], body['prompt_token_ids'] = list(answer.ids), list(answer.prompt)
    return Completion(body, tuple(forms), bad)


def streamed(body: dict, fields: Fields) -> bytes:
    """Encode a completion as server-sent events, with the answer in one event."""
    (choice,) = body['choices']
    base = {name: body[name] for name in ('id', 'created', 'model')}
    base['object'] = 'chat.completion.chunk'
    delta = dict(choice['message'])
    if 'tool_calls' in delta:
        delta['tool_calls'] = [{'index': i, **call} for i, call in enumerate(delta['tool_calls'])]
    first = {'index': 0, 'delta': delta, 'finish_reason': None, 'logprobs': choice['logprobs']}
    last = {'index': 0, 'delta': {}, 'finish_reason': choice['finish_reason']}
    chunks = [base | {'choices': [one]} for one in (first, last)]
    if fields.stream_options.include_usage:
        chunks.append(base | {'choices': [], 'usage': body['usage']})
    lines = [f'data: {json.dumps(chunk)}\n\n' for chunk in chunks]
    return ''.join([*lines, 'data: [DONE]\n\n']).encode()


def stream_error(refused: Refused) -> bytes:
    """Encode an error as a server-sent event, for a stream that has sent its headers."""
    return f'data: {json.dumps(refused.body)}\n\ndata: [DONE]\n\n'.encode()
