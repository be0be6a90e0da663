"""Chat completions as OpenAI words them: what a request asks, and what answers it.

A client sends its own copy of every earlier message. Copies are compared by what they say: white
space around a text, parts of a content, other keys, the spelling of a call's JSON and a stop string
that was cut or added again make no difference (`Said`).
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl_jax.envs.hosts.harness import calls
from agentrl_jax.envs.hosts.world import Answer, Sampling

ROLES = {name: name for name in ('system', 'user', 'assistant', 'tool')}
ROLES |= {'developer': 'system', 'function': 'tool'}
TEXTS = ('text', 'input_text', 'output_text', 'refusal')  # kinds of parts of a content
USED = {
    'messages', 'model', 'tools', 'tool_choice', 'stop', 'max_tokens', 'max_completion_tokens',
    'stream', 'stream_options', 'logprobs', 'return_token_ids', 'n',
}  # fmt: skip
# Bookkeeping of a provider; an answer does not depend on it
LABELS = {
    'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key',
    'prompt_cache_retention', 'request_id', 'cache_salt', 'priority',
}  # fmt: skip
SAMPLING = ('temperature', 'top_p', 'seed')  # that a served policy follows
# Values of other fields that ask for nothing special; null, '', [] and {} never do
PLAIN = {
    'top_k': (-1, 0),
    'min_p': (0,),
    'frequency_penalty': (0,),
    'presence_penalty': (0,),
    'repetition_penalty': (1,),
    'length_penalty': (1,),
    'min_tokens': (0,),
    'top_logprobs': (0,),
    'best_of': (1,),
    'parallel_tool_calls': (True,),
    'response_format': ({'type': 'text'},),
    'modalities': (['text'],),
    'verbosity': ('medium',),
    'add_generation_prompt': (True,),
    'skip_special_tokens': (True,),
    'spaces_between_special_tokens': (True,),
    'echo': (False,),
    'ignore_eos': (False,),
    'use_beam_search': (False,),
    'continue_final_message': (False,),
    'include_stop_str_in_output': (False,),
}
NEVER = {  # fields that are never ignored -> what to do
    'functions': 'send tools instead',
    'function_call': 'send tool_choice instead',
    'continue_final_message': 'the answer is always a new message',
    'echo': 'read the prompt from the request',
    'audio': 'answers are text',
}
# Keys of messages that are read
KEYS = {'role', 'content', 'tool_calls', 'tool_call_id', 'function_call'}


class Refused(Exception):
    """A request without an answer: an HTTP status, and OpenAI's code of the error."""

    def __init__(self, status: int, code: str, sentence: str, param: str | None = None):
        """param: the field at fault."""
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict:
        """As OpenAI's errors are."""
        kind = 'invalid_request_error'
        error = {'message': str(self), 'type': kind, 'param': self.param, 'code': self.code}
        return {'error': error}


@dataclasses.dataclass(frozen=True)
class Said:
    """What a message says."""

    role: str
    content: str
    calls: str = ''  # JSON of [{name, arguments}]

    @property
    def bare(self) -> 'Said':
        """Without white space around the text, and keys of calls in the order of the alphabet."""
        calls = json.dumps(json.loads(self.calls), sort_keys=True) if self.calls else ''
        return dataclasses.replace(self, content=self.content.strip(), calls=calls)

    @property
    def message(self) -> dict:
        """As chat templates expect it."""
        found = {'role': self.role, 'content': self.content}
        if self.calls:
            calls = json.loads(self.calls)
            found['tool_calls'] = [{'type': 'function', 'function': call} for call in calls]
        return found


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, read."""

    messages: tuple[Said, ...]
    tools: tuple[dict, ...]
    stop: tuple[str, ...]
    most: int  # tokens of the answer; 0 = as many as any
    stream: bool
    usage: bool  # at the end of a stream
    logprobs: bool
    ids: bool  # vLLM's return_token_ids
    model: str
    sampling: Sampling | None  # None: the run's own
    ignored: tuple[str, ...]  # fields that change nothing

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools."""
        return frozenset(tool['function']['name'] for tool in self.tools)


def invalid(param: str, sentence: str, code: str = 'invalid_request') -> Refused:
    """400 for a field."""
    return Refused(400, code, sentence, param)


def read(raw: bytes, stops: Sequence[str], *, serving: bool = False) -> Asked:
    """A request's body; Refused where it asks for what cannot be given.

    stops: strings that may end an answer. serving: the request sets temperature, top_p and seed,
    and a field without effect is an error; otherwise the run's sampling applies, and such fields
    are listed in `ignored`.
    """
    try:
        body = calls.read_json(raw)
    except ValueError as error:
        raise Refused(400, 'invalid_json', f'the body is not JSON: {error}') from error
    if not isinstance(body, dict) or not isinstance(body.get('messages'), list):
        raise invalid('messages', 'a request is an object with a list of messages')
    ignored = _check_fields(body, serving)
    messages = tuple(map(said_by, body['messages']))
    if not messages or messages[-1].role == 'assistant':
        raise invalid('messages', 'the last message must be of another role', 'unsupported_prefill')
    ignored += dict.fromkeys(f'messages.{key}' for key in _unread_keys(body['messages']))
    tools, choice = _tools(body.get('tools')), body.get('tool_choice')
    sampling = _sampling(body)
    options = body.get('stream_options') or {}
    if not isinstance(options, dict):
        raise invalid('stream_options', f'stream_options={options!r:.50} must be an object')
    return Asked(
        messages=messages,
        tools=() if choice == 'none' else tools,
        stop=_stop(body.get('stop'), stops, '--stop' if serving else 'harness.stop'),
        most=_token_limit(body),
        stream=_truth(body, 'stream'),
        usage=_truth(options, 'include_usage'),
        logprobs=_truth(body, 'logprobs'),
        ids=_truth(body, 'return_token_ids'),
        model=str(body.get('model') or 'policy'),
        sampling=sampling if serving else None,
        ignored=tuple(ignored),
    )


def _check_fields(body: Mapping, serving: bool) -> list[str]:
    """Return the names of fields without effect; reject fields that are never ignored."""
    if body.get('n') not in (None, 1):
        raise invalid('n', 'n must be 1: ask again for another answer', 'unsupported_n')
    ignored = []
    for name, value in body.items():
        if name in USED or name in LABELS or value in (None, '', [], {}):
            continue
        plain = PLAIN.get(name, ())
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in plain):
            continue
        if name in NEVER:
            raise invalid(name, f'{name} is not supported: {NEVER[name]}', 'unsupported_field')
        if not (serving and name in SAMPLING):
            ignored.append(name)
    choice = body.get('tool_choice')
    if choice not in (None, 'none', 'auto', 'required') and not isinstance(choice, dict):
        raise invalid('tool_choice', f'tool_choice={choice!r:.50} must be none, auto or required')
    if choice not in (None, 'none', 'auto'):
        ignored.append('tool_choice')
    if serving and ignored:
        name = ignored[0]
        value = json.dumps(body[name])[:50]
        raise invalid(
            name,
            f'{name}={value} is not supported: leave it out',
            'unsupported_field',
        )
    return ignored


def _unread_keys(messages: Sequence[Mapping]) -> Iterator[str]:
    for message in messages:
        for key, value in message.items():
            names_tool = key == 'name' and ROLES[message['role']] == 'tool'
            if key not in KEYS and value not in (None, '', [], {}) and not names_tool:
                yield key


def _truth(body: Mapping, name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise invalid(name, f'{name}={value!r:.50} must be true or false')
    return bool(value)


def _stop(stop: Any, stops: Sequence[str], setting: str) -> tuple[str, ...]:
    stop = stop or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(one, str) for one in stop):
        raise invalid('stop', 'stop is a text or a list of texts')
    if unknown := sorted(set(stop) - set(stops)):
        raise invalid('stop', f'{setting} lacks the stop string {unknown[0]!r}', 'unknown_stop')
    return tuple(stop)


def _token_limit(body: Mapping) -> int:
    """The smaller of both token limits; 0 = no limit."""
    limits = []
    for name in ('max_completion_tokens', 'max_tokens'):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(name, f'{name}={value!r:.50} must be a number of tokens of at least 1')
        limits.append(value)
    return min(limits, default=0)


def _tools(tools: Any) -> tuple[dict, ...]:
    tools = tools or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(one, dict) for one in tools):
        raise invalid('tools', 'tools are a list of objects')
    for tool in tools:
        function = tool.get('function')
        if tool.get('type', 'function') != 'function':
            raise invalid('tools', f'tools of type {tool["type"]!r:.50} are not supported')
        if not isinstance(function, dict) or not isinstance(function.get('name'), str):
            raise invalid('tools', f'a tool needs a function with a name: {tool!r:.100}')
    return tuple(tools)


def _sampling(body: Mapping) -> Sampling | None:
    """The sampling settings of a request; None if it has none."""
    bounds = {'temperature': (0, 100), 'top_p': (0, 1), 'seed': (-(2**63), 2**64)}
    values = {name: body[name] for name in bounds if body.get(name) is not None}
    for name, value in values.items():
        low, high = bounds[name]
        number = isinstance(value, int if name == 'seed' else int | float)
        if not number or isinstance(value, bool) or not low <= value <= high:
            kind = 'an integer' if name == 'seed' else f'a number from {low} to {high}'
            raise invalid(name, f'{name}={value!r:.50} must be {kind}')
    return Sampling(**values) if values else None


def said_by(message: Any) -> Said:
    """What a message of a request says."""
    role = message.get('role') if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise invalid('messages', f'no message of a known role: {message!r:.100}', 'invalid_role')
    entries = message.get('tool_calls') or ()
    if not isinstance(entries, list | tuple):
        raise invalid('messages', 'tool_calls are a list of objects')
    functions = [one.get('function') if isinstance(one, dict) else one for one in entries]
    if message.get('function_call') is not None:  # before there were tools
        functions.append(message['function_call'])
    functions = [_call_of(function) for function in functions]
    written = json.dumps(functions, ensure_ascii=False) if functions else ''
    return Said(ROLES[role], text_of(message.get('content')), written)


def text_of(content: Any) -> str:
    """The text of a content, which may be in parts."""
    if content is None or isinstance(content, str):
        return content or ''
    found = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get('type') if isinstance(part, dict) else type(part).__name__
        text = part.get('text', part.get('refusal')) if kind in TEXTS else None
        if not isinstance(text, str):
            raise invalid('messages', f'a content of type {kind!r}', 'unsupported_content')
        found.append(text)
    return ''.join(found)


def _call_of(function: Any) -> dict:
    """{'name', 'arguments'} of a call in a history; arguments stay a text if they are no object."""
    try:
        return calls.read_call(function)
    except ValueError as error:
        if not isinstance(function, dict) or not isinstance(function.get('name'), str):
            raise invalid('messages', f'no function of a call: {function!r:.100}') from error
        if not isinstance(function.get('arguments'), str):
            raise invalid('messages', f'arguments of a call: {error}') from error
        return {'name': function['name'], 'arguments': function['arguments']}


# ---- answers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Completion:
    """A body that answers a request."""

    body: dict
    forms: tuple[Said, ...]  # in which the answer may come back
    bad_calls: int  # that could not be read


def complete(answer: Answer, asked: Asked, name: str) -> Completion:
    """The chat.completion of an answer; name: of this answer, in its id and those of its calls.

    A call that cannot be read leaves the answer a text, as with vLLM, and is counted.
    """
    whole = str(answer)
    text = whole
    for stop in asked.stop:
        text = text.partition(stop)[0]
    before, found, bad = text, [], 0
    if asked.tools:
        before, found, bad = calls.find_calls(text, answer.calls, asked.names)
    message: dict[str, Any] = {'role': 'assistant', 'content': text}
    if found and not bad:
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
            for number, call in enumerate(found)
        ]
    forms = [said_by(message)]
    if text != whole:
        forms += [Said('assistant', text + stop) for stop in asked.stop]
        forms.append(Said('assistant', whole))
    finish = 'tool_calls' if 'tool_calls' in message else answer.finish
    choice = {'index': 0, 'message': message, 'finish_reason': finish, 'logprobs': None}
    if asked.logprobs:
        pieces = zip(answer.pieces, answer.logprobs, strict=True)
        choice['logprobs'] = {'content': [_logprob(*piece) for piece in pieces], 'refusal': None}
    counts = {'prompt_tokens': len(answer.prompt), 'completion_tokens': len(answer.ids)}
    body = {
        'id': f'chatcmpl-{name}',
        'object': 'chat.completion',
        'created': int(time.time()),
        'model': asked.model,
        'choices': [choice],
        'usage': counts | {'total_tokens': sum(counts.values())},
    }
    if asked.ids:
        choice['token_ids'], body['prompt_token_ids'] = list(answer.ids), list(answer.prompt)
    return Completion(body, tuple(forms), bad)


def _logprob(piece: bytes, logprob: float) -> dict:
    text = piece.decode('utf-8', 'replace')
    return {'token': text, 'bytes': list(piece), 'logprob': logprob, 'top_logprobs': []}


def streamed(body: dict, usage: bool) -> bytes:
    """A completion as server-sent events, in one piece."""
    (choice,) = body['choices']
    base = {name: body[name] for name in ('id', 'created', 'model')}
    base['object'] = 'chat.completion.chunk'
    delta = dict(choice['message'])
    if 'tool_calls' in delta:
        delta['tool_calls'] = [{'index': i, **call} for i, call in enumerate(delta['tool_calls'])]
    first = {'index': 0, 'delta': delta, 'finish_reason': None, 'logprobs': choice['logprobs']}
    last = {'index': 0, 'delta': {}, 'finish_reason': choice['finish_reason']}
    chunks = [base | {'choices': [one]} for one in (first, last)]
    if usage:
        chunks.append(base | {'choices': [], 'usage': body['usage']})
    lines = [f'data: {json.dumps(chunk)}\n\n' for chunk in chunks]
    return ''.join([*lines, 'data: [DONE]\n\n']).encode()


def stream_error(refused: Refused) -> bytes:
    """An error as a server-sent event, after the headers of a stream were sent."""
    return f'data: {json.dumps(refused.body)}\n\ndata: [DONE]\n\n'.encode()
