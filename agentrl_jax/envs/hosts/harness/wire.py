"""Chat completions as OpenAI words them: what a request asks, and what answers it.

A client sends its own copy of every earlier message. Copies are compared by what they say: white
space around a text, parts of a content, other keys, the spelling of a call's JSON and a stop string
that was cut or added again make no difference (`Said`).
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.envs.hosts.world import Answer

CALLS = {  # in an answer, by how its template words them
    'tags': re.compile(r'<tool_call>(.*?)(?:</tool_call>|\Z)', re.DOTALL),
    # After Llama 3's token for it, or an object that is the answer or its end: one in an answer
    'object': re.compile(r'(?:<\|python_tag\|>|\A\s*(?={)|(?={\s*"name"\s*:))(.*)', re.DOTALL),
}
ROLES = {name: name for name in ('system', 'user', 'assistant', 'tool')}
ROLES |= {'developer': 'system', 'function': 'tool'}
TEXTS = ('text', 'input_text', 'output_text', 'refusal')  # kinds of parts of a content
# Fields that would shape sampling: the run's settings hold, for it trains what was sampled
IGNORED = (
    'temperature',
    'top_p',
    'top_k',
    'min_p',
    'seed',
    'frequency_penalty',
    'presence_penalty',
    'logit_bias',
)


class Refused(Exception):
    """A request without an answer: an HTTP status, and OpenAI's code of the error."""

    def __init__(self, status: int, code: str, sentence: str):
        super().__init__(sentence)
        self.status, self.code = status, code

    @property
    def body(self) -> dict:
        """As OpenAI's errors are."""
        kind = 'invalid_request_error'
        return {'error': {'message': str(self), 'type': kind, 'param': None, 'code': self.code}}


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
    ignored: tuple[str, ...]  # fields that change nothing


def read(raw: bytes, stops: Sequence[str]) -> Asked:
    """A request's body; Refused where it asks for what cannot be given.

    stops: strings that may end an answer.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, 'invalid_json', f'no JSON: {error}') from error
    if not isinstance(body, dict) or not isinstance(body.get('messages'), list):
        raise Refused(400, 'invalid_request', 'a request is an object with a list of messages')
    if body.get('n') not in (None, 1):
        raise Refused(400, 'unsupported_n', 'n must be 1: ask again for another answer')
    messages = tuple(map(said_by, body['messages']))
    if not messages or messages[-1].role == 'assistant':
        raise Refused(400, 'unsupported_prefill', 'the last message must be of another role')
    stop = body.get('stop') or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(one, str) for one in stop):
        raise Refused(400, 'invalid_request', 'stop is a text or a list of texts')
    stop = tuple(stop)
    if unknown := sorted(set(stop) - set(stops)):
        raise Refused(400, 'unknown_stop', f'harness.stop lacks the stop string {unknown[0]!r}')
    most = body.get('max_completion_tokens') or body.get('max_tokens') or 0
    if not isinstance(most, int) or most < 0:
        raise Refused(400, 'invalid_request', f'max_tokens={most!r} is no number of tokens')
    choice, form = body.get('tool_choice'), body.get('response_format')
    tools = body.get('tools') or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(one, dict) for one in tools):
        raise Refused(400, 'invalid_request', 'tools are a list of objects')
    ignored = [name for name in IGNORED if body.get(name) not in (None, {})]
    if choice not in (None, 'none', 'auto'):
        ignored.append('tool_choice')
    if isinstance(form, dict) and form.get('type', 'text') != 'text':
        ignored.append('response_format')
    options = body.get('stream_options')
    return Asked(
        messages=messages,
        tools=() if choice == 'none' else tuple(tools),
        stop=stop,
        most=most,
        stream=bool(body.get('stream')),
        usage=isinstance(options, dict) and bool(options.get('include_usage')),
        logprobs=bool(body.get('logprobs')),
        ids=bool(body.get('return_token_ids')),
        model=str(body.get('model') or 'policy'),
        ignored=tuple(ignored),
    )


def said_by(message: Any) -> Said:
    """What a message of a request says."""
    role = message.get('role') if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(400, 'invalid_role', f'no message of a known role: {message!r:.100}')
    calls = message.get('tool_calls') or ()
    if not isinstance(calls, list | tuple):
        raise Refused(400, 'invalid_request', 'tool_calls are a list of objects')
    found = [call_of(call) for call in calls if isinstance(call, dict)]
    written = json.dumps(found, ensure_ascii=False) if found else ''
    return Said(ROLES[role], text_of(message.get('content')), written)


def text_of(content: Any) -> str:
    """The text of a content, which may be in parts."""
    if content is None or isinstance(content, str):
        return content or ''
    found = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get('type') if isinstance(part, dict) else type(part).__name__
        if kind not in TEXTS:
            raise Refused(400, 'unsupported_content', f'a content of type {kind!r}')
        found.append(str(part.get('text', part.get('refusal', ''))))
    return ''.join(found)


def call_of(call: Mapping) -> dict:
    """{'name', 'arguments'} of a call; arguments are an object where they can be read as one."""
    function = call.get('function') or {}
    if not isinstance(function, dict):
        raise Refused(400, 'invalid_request', f'function of a call is no object: {function!r:.100}')
    arguments = function.get('arguments') or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {'name': str(function.get('name', '')), 'arguments': arguments}


# ---- answers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Completion:
    """A body that answers a request."""

    body: dict
    forms: tuple[Said, ...]  # in which the answer may come back
    bad_calls: int  # that could not be read


def calls_in(text: str, worded: str) -> tuple[list[dict], int]:
    """(calls {name, arguments} of an answer, how many more cannot be read); worded: as in CALLS."""
    found, bad = [], 0
    for written in CALLS[worded].finditer(text):
        try:
            call = json.loads(written[1])
            if not written[0].startswith('<') and 'name' not in call:
                continue  # an answer in JSON
            arguments = call.get('arguments', call.get('parameters', {}))
            found.append({'name': str(call['name']), 'arguments': arguments})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            bad += 1
    return found, bad


def complete(answer: Answer, asked: Asked, name: str) -> Completion:
    """The chat.completion of an answer; name: of this answer, in its id and those of its calls.

    A call that cannot be read leaves the answer a text, as with vLLM, and is counted.
    """
    whole = str(answer)
    text = whole
    for stop in asked.stop:
        text = text.partition(stop)[0]
    calls, bad = calls_in(text, answer.calls) if asked.tools else ([], 0)
    message: dict[str, Any] = {'role': 'assistant', 'content': text}
    if calls and not bad:
        message['content'] = text[: CALLS[answer.calls].search(text).start()].strip() or None
        message['tool_calls'] = [
            {
                'id': f'call_{name}_{number}',
                'type': 'function',
                'function': {
                    'name': call['name'],
                    'arguments': json.dumps(call['arguments'], ensure_ascii=False),
                },
            }
            for number, call in enumerate(calls)
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
