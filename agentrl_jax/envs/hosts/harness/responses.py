"""OpenAI's Responses API: requests and answers, with the types of the package openai.

An answer is up to three kinds of items: its thought (reasoning), its text (message) and its calls.
A request repeats earlier items, refers to them (item_reference), or continues an earlier response
(previous_response_id).
"""

import json
import time
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic
from openai.types import responses as openai
from openai.types.responses import response_input_item_param as items
from openai.types.responses import response_reasoning_item as reasoning
from openai.types.responses import response_reasoning_item_param as reasoning_param
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_output_text import Logprob
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.wire import ParsedRequest, Said, Turn

LOGPROBS = 'message.output_text.logprobs'  # in the field include
USED = {
    'input', 'instructions', 'max_output_tokens', 'tools', 'tool_choice', 'stream',
    'previous_response_id', 'temperature', 'top_p', 'return_token_ids',
}  # fmt: skip
# Fields that do not affect an answer, and those that only describe how long to think
LABELS = {
    'model', 'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key',
    'prompt_cache_retention', 'prompt_cache_options', 'stream_options', 'client_metadata',
    'include', 'reasoning',
}  # fmt: skip
PLAIN = {
    'parallel_tool_calls': (True,),
    'truncation': ('disabled',),
    'background': (False,),
    'top_logprobs': (0,),
}
NEVER = {
    'background': 'wait for the answer',
    'conversation': 'send previous_response_id instead',
    'prompt': 'send its text as input',
}


class OutputText(openai.ResponseOutputTextParam, total=False):
    """Text of an answer; clients leave out its annotations."""

    annotations: Iterable[Any]


Part = openai.ResponseInputTextParam | OutputText | openai.ResponseOutputRefusalParam
Parts = str | list[Annotated[Part, pydantic.Field(discriminator='type'), wire.NULLS]]


class Message(openai.EasyInputMessageParam):
    """A message of any role; answers may have their status."""

    content: Parts


class Reasoning(openai.ResponseReasoningItemParam, total=False):
    """A thought; clients leave out its id."""

    id: str | None
    content: list[reasoning_param.Content] | None
    summary: list[reasoning_param.Summary]


class CallOutput(items.FunctionCallOutput):
    output: Parts


class Tool(openai.FunctionToolParam, total=False):
    """A function; clients leave out the fields that may be null."""

    parameters: dict[str, object] | None
    strict: bool | None


def kind_of(item: Any) -> str | None:
    """Return the type of an item; messages need none."""
    return item.get('type', 'message') if isinstance(item, dict) else None


Item = Annotated[
    Annotated[Message, pydantic.Tag('message')]
    | Annotated[Reasoning, pydantic.Tag('reasoning')]
    | Annotated[openai.ResponseFunctionToolCallParam, pydantic.Tag('function_call')]
    | Annotated[CallOutput, pydantic.Tag('function_call_output')]
    | Annotated[items.ItemReference, pydantic.Tag('item_reference')],
    pydantic.Discriminator(kind_of),
    wire.NULLS,
]


class Request(ResponseCreateParamsBase, total=False):
    """A request with the supported kinds of items and tools."""

    input: str | list[Item]
    tools: list[Tool]
    max_output_tokens: Annotated[int, pydantic.Field(ge=1)] | None
    temperature: Annotated[float, pydantic.Field(ge=0, le=100)] | None
    top_p: Annotated[float, pydantic.Field(ge=0, le=1)] | None
    stream: bool | None
    return_token_ids: bool  # an extension, as in chat completions


EVENTS = {  # by their type, without response.
    kind.model_fields['type'].annotation.__args__[0].removeprefix('response.'): kind
    for kind in typing.get_args(typing.get_args(openai.ResponseStreamEvent)[0])
}
REQUEST = pydantic.TypeAdapter(Request)


def read(body: Any, stops: Sequence[str], serving: bool) -> ParsedRequest:
    """Parse a request, see wire.read."""
    del stops  # the dialect has no stop strings
    body, hosted = wire.without_hosted_tools(body, ('function',))
    fields = wire.validate(REQUEST, body)
    ignored = wire.check_fields(body, serving, used=USED | LABELS, plain=PLAIN, never=NEVER)
    if fields.get('text', {}).get('format', {'type': 'text'}) == {'type': 'text'}:
        ignored = [name for name in ignored if name != 'text']
    choice = fields.get('tool_choice', 'auto')
    if choice not in ('none', 'auto'):
        ignored.append('tool_choice')
    if serving:
        wire.check_ignored(body, ignored)
    ignored += hosted
    said = fields.get('input', [])
    instructions = fields.get('instructions')
    head = [Said('system', instructions)] if instructions else []
    messages = [Said('user', said)] if isinstance(said, str) else read_items(said)
    tools = fields.get('tools', []) if choice != 'none' else []
    return ParsedRequest(
        dialect=wire.load('responses'),
        fields=wire.without_history(fields),
        messages=(*head, *messages),
        tools=tuple(map(read_tool, tools)),
        model=fields.get('model', 'policy'),
        token_limit=fields.get('max_output_tokens', 0),
        streams=fields.get('stream', False),
        sampling=wire.sampling_of(fields, serving),
        ignored=tuple(ignored),
        previous=name_of(fields.get('previous_response_id', '')),
        instructions=len(head),
    )


def read_tool(tool: Mapping) -> dict:
    """Return a tool as in chat completions."""
    about = {name: tool[name] for name in ('name', 'description', 'parameters') if tool.get(name)}
    return {'type': 'function', 'function': about}


def name_of(item_id: str) -> str:
    """Return the name of the answer in an id of `write`."""
    kind, _, rest = item_id.partition('_')
    return rest.rpartition('_')[0] if kind == 'fc' else rest


def text_of(parts: Parts) -> str:
    """Return the text of a content."""
    if isinstance(parts, str):
        return parts
    return ''.join(part.get('text', part.get('refusal')) for part in parts)


def read_items(said: Iterable[Mapping]) -> Iterator[Said]:
    """Return the messages of items; neighbouring items of an answer are one message."""
    thoughts, texts, functions, name = [], [], [], ''
    for item in [*said, {'type': 'end'}]:
        kind, role = kind_of(item), item.get('role')
        if kind == 'reasoning':
            thoughts += [part['text'] for part in item.get('content') or item.get('summary', ())]
        elif kind == 'item_reference':
            name = name_of(item['id'])
        elif kind == 'function_call':
            functions.append(item)
        elif role == 'assistant':
            texts.append(text_of(item['content']))
        else:
            if name:  # of all its items
                yield Said('assistant', '', answer=name)
            elif thoughts or texts or functions:
                yield wire.answer_of(thoughts, texts, functions)
            thoughts, texts, functions, name = [], [], [], ''
            if kind == 'function_call_output':
                yield Said('tool', text_of(item['output']))
            elif kind == 'message':
                role = 'system' if role == 'developer' else role
                yield Said(role, text_of(item['content']))


# ---- answers -------------------------------------------------------------------------------------


def write(turn: Turn) -> tuple[openai.Response, list[Said]]:
    """Return the response of an answer, and how later requests may repeat it."""
    fields, name, output = turn.request.fields, turn.name, []
    status = 'incomplete' if turn.answer.finish == 'length' else 'completed'
    if turn.thought:
        parts = [reasoning.Content(type='reasoning_text', text=turn.thought)]
        item = {'id': f'rs_{name}', 'summary': [], 'content': parts, 'status': status}
        output.append(openai.ResponseReasoningItem(type='reasoning', **item))
    if turn.rest or not turn.calls:
        about = turn.logprobs if LOGPROBS in fields.get('include', ()) else []
        part = {'text': turn.rest, 'annotations': [], 'logprobs': [Logprob(**x) for x in about]}
        parts = [openai.ResponseOutputText(type='output_text', **part)]
        item = {'id': f'msg_{name}', 'role': 'assistant', 'status': status, 'content': parts}
        output.append(openai.ResponseOutputMessage(type='message', **item))
    for number, call in enumerate(turn.calls):
        item = {'id': f'fc_{name}_{number}', 'call_id': f'call_{name}_{number}'}
        item |= {'name': call['name'], 'status': 'completed'}
        item['arguments'] = json.dumps(call['arguments'], ensure_ascii=False)
        output.append(openai.ResponseFunctionToolCall(type='function_call', **item))
    inputs, outputs = len(turn.answer.prompt), len(turn.answer.ids)
    response = openai.Response(
        id=f'resp_{name}',
        object='response',
        created_at=int(time.time()),
        status=status,
        model=turn.request.model,
        output=output,
        instructions=fields.get('instructions'),
        previous_response_id=fields.get('previous_response_id'),
        incomplete_details={'reason': 'max_output_tokens'} if status == 'incomplete' else None,
        error=None,
        metadata=fields.get('metadata', {}),
        parallel_tool_calls=True,
        tool_choice='none' if fields.get('tool_choice') == 'none' else 'auto',
        tools=[],
        usage=openai.ResponseUsage(
            input_tokens=inputs,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens=outputs,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=inputs + outputs,
        ),
        **turn.token_ids,
    )
    return response, wire.forms_of(turn)


def encode(response: openai.Response, request: ParsedRequest) -> bytes:
    """Return a response as JSON."""
    del request
    return wire.dump(response).encode()


def stream(response: openai.Response, request: ParsedRequest) -> bytes:
    """Return a response as server-sent events, with each item in one delta."""
    del request
    lines = []
    for number, event in enumerate(events(response)):
        event.sequence_number = number
        data = wire.dump(event)
        lines.append(f'event: {event.type}\ndata: {data}\n\n')
    return ''.join(lines).encode()


def make(kind: str, **fields: Any) -> Any:
    """Return an event."""
    return EVENTS[kind](type=f'response.{kind}', sequence_number=0, **fields)


def events(response: openai.Response) -> Iterator[Any]:
    """Yield the events of a response."""
    start = {'status': 'in_progress', 'output': [], 'usage': None, 'incomplete_details': None}
    start = response.model_copy(update=start)
    yield make('created', response=start)
    yield make('in_progress', response=start)
    for index, item in enumerate(response.output):
        empty = {'arguments': ''} if item.type == 'function_call' else {'content': []}
        added = item.model_copy(update=empty | {'status': 'in_progress'})
        yield make('output_item.added', item=added, output_index=index)
        at = {'item_id': item.id, 'output_index': index}
        if item.type == 'function_call':
            text = {'arguments': item.arguments, 'name': item.name}
            yield make('function_call_arguments.delta', delta=item.arguments, **at)
            yield make('function_call_arguments.done', **text, **at)
        elif item.type == 'reasoning':
            at['content_index'] = 0
            yield make('reasoning_text.delta', delta=item.content[0].text, **at)
            yield make('reasoning_text.done', text=item.content[0].text, **at)
        else:
            (part,), at['content_index'] = item.content, 0
            empty = part.model_copy(update={'text': '', 'logprobs': []})
            about = at | {'logprobs': [one.model_dump() for one in part.logprobs]}
            yield make('content_part.added', part=empty, **at)
            yield make('output_text.delta', delta=part.text, **about)
            yield make('output_text.done', text=part.text, **about)
            yield make('content_part.done', part=part, **at)
        yield make('output_item.done', item=item, output_index=index)
    yield make(response.status, response=response)
