"""The internal form of requests and answers, which all dialects of the endpoint share.

A client resends a copy of every earlier message. Copies are compared by content (`Said`). These
differences are ignored: white space around a text, the parts of a content, other keys, the JSON
formatting of a call, and a stop string that was cut or added.

A dialect is a module with these functions:

  read(body, stops, serving) -> ParsedRequest    a request as JSON; raises Refused
  write(turn) -> (object, forms)    the answer to a turn, and how later requests may repeat it
  encode(object, request) -> bytes  the answer as JSON
  stream(object, request) -> bytes  the answer as server-sent events
"""

import dataclasses
import functools
import importlib
import json
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import pydantic

from agentrl_jax.envs.hosts.harness import calls
from agentrl_jax.envs.hosts.world import Answer, Sampling

PATHS = {  # of each dialect, after /v1/
    'chat': 'chat/completions',
    'responses': 'responses',
    'messages': 'messages',
}
SAMPLING = ('temperature', 'top_p', 'seed')  # supported by a served policy
EMPTY = (None, '', [], {})  # the same as a missing field
# Anthropic's error types by status; others are invalid_request_error
ERROR_TYPES = {404: 'not_found_error', 413: 'request_too_large'}


class Refused(Exception):
    """A rejected request: an HTTP status and OpenAI's error code."""

    def __init__(self, status: int, code: str, sentence: str, param: str | None = None):
        """param: the field at fault."""
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param

    def body(self, dialect: str = 'chat') -> dict:
        """Return the error in the format of a dialect; Anthropic's has no code, so it is added."""
        if dialect != 'messages':
            about = {'type': 'invalid_request_error', 'param': self.param, 'code': self.code}
            return {'error': {'message': str(self)} | about}
        # Clients compact a conversation after an error that starts with these words
        start = 'prompt is too long: ' if self.code == 'context_length_exceeded' else ''
        kind = ERROR_TYPES.get(self.status, 'invalid_request_error')
        error = {'type': kind, 'message': f'{start}{self}', 'code': self.code}
        return {'type': 'error', 'error': error}

    def event(self, dialect: str = 'chat') -> bytes:
        """Return the error as a server-sent event, for a stream that has sent its headers."""
        if dialect == 'chat':
            return f'data: {json.dumps(self.body())}\n\ndata: [DONE]\n\n'.encode()
        body = self.body(dialect)
        if dialect == 'responses':  # fields of ResponseErrorEvent
            fields = {'code': self.code, 'message': str(self), 'param': self.param}
            body = {'type': 'error', 'sequence_number': 0} | fields
        return f'event: error\ndata: {json.dumps(body)}\n\n'.encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """The content of a message."""

    role: str
    content: str
    calls: str = ''  # JSON of [{name, arguments}]
    answer: str = dataclasses.field(default='', repr=False)  # name of an earlier answer, which
    # replaces the message; the random stream of a branch depends on the repr

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


def answer_of(thoughts: Sequence[str], texts: Sequence[str], functions: Sequence[dict]) -> Said:
    """Return the message of an answer that a client repeats in parts.

    functions: mappings with a name and arguments.
    """
    text = ''.join(texts)
    if thought := ''.join(thoughts).strip():
        text = f'{calls.THINK}\n{thought}\n{calls.END_OF_THOUGHT}\n\n{text.strip()}'
    if not functions:
        return Said('assistant', text)
    return Said('assistant', text, json.dumps(list(map(call_of, functions)), ensure_ascii=False))


def call_of(function: Any) -> dict:
    """Return {'name', 'arguments'} of an earlier call; invalid arguments stay text."""
    try:
        return calls.read_call(function)
    except ValueError as error:
        if not isinstance(function, dict) or not isinstance(function.get('name'), str):
            raise invalid('messages', f'invalid function in a call: {function!r:.100}') from error
        if not isinstance(function.get('arguments'), str):
            raise invalid('messages', f'invalid arguments of a call: {error}') from error
        return {'name': function['name'], 'arguments': function['arguments']}


# ---- requests ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A request in the internal form."""

    dialect: ModuleType
    fields: Any  # of the dialect
    messages: tuple[Said, ...]
    tools: tuple[dict, ...] = ()  # as in chat completions
    stop: tuple[str, ...] = ()
    model: str = 'policy'
    token_limit: int = 0  # of the answer; 0 = no limit
    streams: bool = False
    sampling: Sampling | None = None  # None: the run's settings
    ignored: tuple[str, ...] = ()  # fields without effect
    previous: str = ''  # name of the answer that it continues; messages follow it
    instructions: int = 0  # leading messages that are not part of what later requests continue

    @property
    def answers(self) -> list[str]:
        """Names of the earlier answers that it refers to."""
        names = [self.previous, *(one.answer for one in self.messages)]
        return [name for name in names if name]


def invalid(param: str, sentence: str, code: str = 'invalid_request') -> Refused:
    """Return a 400 error for a field."""
    return Refused(400, code, sentence, param)


@functools.cache
def load(dialect: str) -> ModuleType:
    """Import a dialect; its types come from an optional package of its vendor."""
    try:
        return importlib.import_module(f'{__package__}.{dialect}')
    except ModuleNotFoundError as error:
        package = error.name.partition('.')[0]
    sentence = f"/v1/{PATHS[dialect]} needs {package}: pip install 'agentrl_jax[dialects]'"
    raise Refused(400, 'missing_package', sentence)


def read_json(raw: bytes) -> Any:
    """Parse JSON; raise Refused if it is invalid."""
    try:
        return calls.read_json(raw)
    except ValueError as error:
        raise Refused(400, 'invalid_json', f'the body is not JSON: {error}') from error


def read_count(raw: bytes) -> ParsedRequest:
    """Parse a request for the number of its tokens; it has no max_tokens."""
    body = read_json(raw)
    body = {'max_tokens': 1} | body if isinstance(body, dict) else body
    return load('messages').read(body, (), False)


def read(
    raw: bytes, stops: Sequence[str], dialect: str = 'chat', *, serving: bool = False
) -> ParsedRequest:
    """Parse the body of a request; raise Refused if it is invalid or not supported.

    stops: strings that may end an answer. serving: the request sets temperature, top_p and seed,
    and a field without effect is an error. Otherwise fields without effect are listed in `ignored`.
    """
    request = load(dialect).read(read_json(raw), stops, serving)
    if not request.messages or request.messages[-1].role == 'assistant':
        raise invalid('messages', 'the last message is from the assistant', 'unsupported_prefill')
    return request


def validate(kind: pydantic.TypeAdapter, body: Any) -> Any:
    """Return the fields of a request in a type; raise Refused for the first invalid one."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value not in EMPTY}
    try:
        return kind.validate_python(body, strict=True)
    except pydantic.ValidationError as error:
        first = max(error.errors(), key=lambda one: len(one['loc']))  # the most exact of a union
    names = map(str, first['loc'])
    where = [name for name in names if '[' not in name] or ['body']  # without types of unions
    shown = f'{first["input"]!r:.50}'
    raise invalid(where[0], f'{".".join(where)}={shown} is invalid: {first["msg"]}')


def without_nulls(value: Any) -> Any:
    """Remove null fields of an item, which clients send for missing ones."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if one is not None}


NULLS = pydantic.BeforeValidator(without_nulls)


def without_hosted_tools(body: Any, kinds: Sequence[str | None]) -> tuple[Any, list[str]]:
    """Return (a request with only the tools of these types, the names of other types).

    Others run on the vendor's servers, or have a fixed format that only its models know.
    """
    tools = body.get('tools') if isinstance(body, dict) else None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return body, []
    hosted = [tool for tool in tools if tool.get('type') not in kinds]
    names = [f'tools.{tool.get("type")}' for tool in hosted]
    tools = [tool for tool in tools if tool.get('type') in kinds]
    return body | {'tools': tools}, list(dict.fromkeys(names))


def without_history(fields: Mapping) -> dict:
    """Return the fields that an answer may need; its episode keeps them."""
    large = ('input', 'messages', 'system', 'tools')
    return {name: value for name, value in fields.items() if name not in large}


def check_fields(
    body: Mapping,
    serving: bool,
    *,
    used: Collection[str],
    plain: Mapping[str, Sequence],
    never: Mapping[str, str],
) -> list[str]:
    """Return the names of fields without effect; raise Refused for a field in `never`.

    used: fields with an effect, and labels. plain: default values of others, which have none.
    never: fields that are always rejected -> alternative.
    """
    ignored = []
    for name, value in body.items():
        if (name in used and name not in SAMPLING) or value in EMPTY:
            continue
        same = (
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in plain.get(name, ())
        )
        if any(same):
            continue
        if name in never:
            raise invalid(name, f'{name} is not supported: {never[name]}', 'unsupported_field')
        if not (serving and name in SAMPLING):
            ignored.append(name)
    return ignored


def check_ignored(body: Mapping, ignored: Sequence[str]) -> None:
    """Raise Refused for the first field without effect."""
    for name in ignored:
        sentence = f'{name}={json.dumps(body[name])[:50]} is not supported: remove it'
        raise invalid(name, sentence, 'unsupported_field')


def check_stops(stop: Sequence[str], stops: Sequence[str], serving: bool, name: str) -> None:
    """Raise Refused for a stop string that the run does not have."""
    if unknown := sorted(set(stop) - set(stops)):
        setting = '--stop' if serving else 'hosts.stop'
        raise invalid(name, f'{setting} lacks the stop string {unknown[0]!r}', 'unknown_stop')


def sampling_of(fields: Mapping, serving: bool) -> Sampling | None:
    """Return how a served request is sampled; None = the run's settings."""
    sampling = Sampling(*map(fields.get, SAMPLING))
    return sampling if serving and sampling != Sampling() else None


# ---- answers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Turn:
    """An answer in the internal form, and its request."""

    request: ParsedRequest
    answer: Answer
    name: str  # part of the ids of the answer and its calls
    text: str  # before the first call; if there is none, the text before a stop string
    calls: tuple[dict, ...] = ()  # {'name', 'arguments'}
    stop: str | None = None  # the stop string that was cut

    @property
    def thought(self) -> str:
        """The text up to the last </think>, without tags and outer white space."""
        thought = self.text.rpartition(calls.END_OF_THOUGHT)[0]
        return thought.strip().removeprefix(calls.THINK).strip()

    @property
    def rest(self) -> str:
        """The text after the thought."""
        before, _, rest = self.text.rpartition(calls.END_OF_THOUGHT)
        return rest.strip() if before or self.calls else rest

    @property
    def token_ids(self) -> dict:
        """The ids of tokens, if the request has `return_token_ids`."""
        if not self.request.fields.get('return_token_ids'):
            return {}
        ids = {'token_ids': self.answer.ids, 'prompt_token_ids': self.answer.prompt}
        return {name: list(value) for name, value in ids.items()}

    @property
    def logprobs(self) -> list[dict]:
        """Token, bytes and log-probability of each token, in OpenAI's format."""
        return [
            {
                'token': piece.decode('utf-8', 'replace'),
                'bytes': list(piece),
                'logprob': logprob,
                'top_logprobs': [],
            }
            for piece, logprob in zip(self.answer.pieces, self.answer.logprobs, strict=True)
        ]


def dump(model: pydantic.BaseModel) -> str:
    """Return an object of a vendor as JSON; pydantic's own JSON has no lone surrogates."""
    return json.dumps(model.model_dump(exclude_unset=True))


def forms_of(turn: Turn) -> list[Said]:
    """Return how later requests may repeat an answer whose thought is a part of its own.

    Some clients leave the thought out, and some put the text together again.
    """
    kinds = ([turn.thought], [turn.rest]), ([], [turn.rest]), ([], [turn.text])
    forms = [answer_of(thoughts, texts, turn.calls) for thoughts, texts in kinds]
    return list(dict.fromkeys(forms))


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to a request."""

    body: Any  # object of the dialect
    forms: tuple[Said, ...]  # how later requests may repeat the answer
    bad_calls: int  # that could not be parsed


def complete(answer: Answer, request: ParsedRequest, name: str) -> Completion:
    """Return the answer to a request in its dialect; name: part of the ids.

    If a call cannot be parsed, the answer stays text, as in vLLM, and the call is counted.
    """
    full_text = str(answer)
    cuts = [(full_text.index(stop), stop) for stop in request.stop if stop in full_text]
    end, stop = min(cuts, default=(len(full_text), None))
    text, functions, bad = full_text[:end], [], 0
    if request.tools:
        names = {tool['function']['name'] for tool in request.tools}
        before, functions, bad = calls.find_calls(text, answer.calls, names)
    if bad or not functions:
        before, functions = text, []
    turn = Turn(request, answer, name, before, tuple(functions), stop)
    body, forms = request.dialect.write(turn)
    forms = list(forms)
    if stop is not None:
        forms += [Said('assistant', text + one) for one in request.stop]
        forms.append(Said('assistant', full_text))
    return Completion(body, tuple(forms), bad)
