"""OpenAI's chat completions: requests and answers."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.wire import EMPTY, ParsedRequest, Said, Turn, invalid

ROLES = {name: name for name in ('system', 'user', 'assistant', 'tool')}
ROLES |= {'developer': 'system', 'function': 'tool'}
TEXTS = ('text', 'input_text', 'output_text', 'refusal')  # types of content parts
# Bookkeeping fields of providers, which do not affect an answer
LABELS = {
    'model', 'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key',
    'prompt_cache_retention', 'request_id', 'cache_salt', 'priority',
}  # fmt: skip
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
NO_LIMIT = 2**31  # tokens
Limit = Annotated[int, pydantic.Field(ge=1)]
# Keys of messages that are read
KEYS = {'role', 'content', 'tool_calls', 'tool_call_id', 'function_call'}


class Function(pydantic.BaseModel):
    name: str


class Tool(pydantic.BaseModel):
    type: Literal['function'] = 'function'
    function: Function


class StreamOptions(pydantic.BaseModel):
    include_usage: bool | None = None


class Fields(pydantic.BaseModel):
    """Supported fields of a request; null, '', [] and {} count as missing."""

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

    def get(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def token_limit(self) -> int:
        """The smaller of the two token limits; 0 = no limit."""
        limit = min(self.max_tokens, self.max_completion_tokens)
        return 0 if limit == NO_LIMIT else limit


REQUEST = pydantic.TypeAdapter(Fields)


def read(body: Any, stops: Sequence[str], serving: bool) -> ParsedRequest:
    """Parse a request, see wire.read."""
    fields = wire.validate(REQUEST, body)
    used = Fields.model_fields.keys() | LABELS
    ignored = wire.check_fields(body, serving, used=used, plain=PLAIN, never=NEVER)
    if body.get('tool_choice') not in (*EMPTY, 'none', 'auto'):
        ignored.append('tool_choice')
    if serving:
        wire.check_ignored(body, ignored)
    messages = tuple(map(read_message, fields.messages))
    ignored += dict.fromkeys(f'messages.{key}' for key in _unread_keys(fields.messages))
    tools = body['tools'] if fields.tools and fields.tool_choice != 'none' else ()
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    wire.check_stops(stop, stops, serving, 'stop')
    fields.messages, fields.tools = [], []  # the episode keeps the rest
    return ParsedRequest(
        dialect=wire.load('chat'),
        fields=fields,
        messages=messages,
        tools=tuple(tools),
        stop=stop,
        model=str(body.get('model') or 'policy'),
        token_limit=fields.token_limit,
        streams=fields.stream,
        sampling=wire.sampling_of(fields, serving),
        ignored=tuple(ignored),
    )


def _unread_keys(messages: Sequence[Mapping]) -> Iterator[str]:
    for message in messages:
        for key, value in message.items():
            names_tool = key == 'name' and ROLES[message['role']] == 'tool'
            if key not in KEYS and value not in EMPTY and not names_tool:
                yield key


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
    functions = [wire.call_of(function) for function in functions]
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


def write(turn: Turn) -> tuple[dict, list[Said]]:
    """Return the chat.completion of an answer, and how later requests may repeat it."""
    message: dict[str, Any] = {'role': 'assistant', 'content': turn.text}
    finish = turn.answer.finish
    if turn.calls:
        finish, message['content'] = 'tool_calls', turn.text.strip() or None
        message['tool_calls'] = [
            {
                'id': f'call_{turn.name}_{number}',
                'type': 'function',
                'function': {
                    'name': call['name'],
                    'arguments': json.dumps(call['arguments'], ensure_ascii=False),
                },
            }
            for number, call in enumerate(turn.calls)
        ]
    choice = {'index': 0, 'message': message, 'finish_reason': finish, 'logprobs': None}
    if turn.request.fields.logprobs:
        choice['logprobs'] = {'content': turn.logprobs, 'refusal': None}
    answer = turn.answer
    counts = {'prompt_tokens': len(answer.prompt), 'completion_tokens': len(answer.ids)}
    body = {
        'id': f'chatcmpl-{turn.name}',
        'object': 'chat.completion',
        'created': int(time.time()),
        'model': turn.request.model,
        'choices': [choice],
        'usage': counts | {'total_tokens': sum(counts.values())},
    }
    if ids := turn.token_ids:
        choice['token_ids'], body['prompt_token_ids'] = ids['token_ids'], ids['prompt_token_ids']
    return body, [read_message(message)]


def encode(body: dict, request: ParsedRequest) -> bytes:
    """Return a completion as JSON."""
    del request
    return json.dumps(body).encode()


def stream(body: dict, request: ParsedRequest) -> bytes:
    """Return a completion as server-sent events, with the answer in one event."""
    (choice,) = body['choices']
    base = {name: body[name] for name in ('id', 'created', 'model')}
    base['object'] = 'chat.completion.chunk'
    delta = dict(choice['message'])
    if 'tool_calls' in delta:
        delta['tool_calls'] = [{'index': i, **call} for i, call in enumerate(delta['tool_calls'])]
    first = {'index': 0, 'delta': delta, 'finish_reason': None, 'logprobs': choice['logprobs']}
    last = {'index': 0, 'delta': {}, 'finish_reason': choice['finish_reason']}
    chunks = [base | {'choices': [one]} for one in (first, last)]
    if request.fields.stream_options.include_usage:
        chunks.append(base | {'choices': [], 'usage': body['usage']})
    lines = [f'data: {json.dumps(chunk)}\n\n' for chunk in chunks]
    return ''.join([*lines, 'data: [DONE]\n\n']).encode()
