"""Anthropic's Messages API: requests and answers, with the types of the package anthropic.

An answer is up to three kinds of blocks: its thought (thinking), its text and its calls (tool_use).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Required

import anthropic.types as anthropic
import pydantic
from anthropic.types.message_create_params import MessageCreateParamsBase
from anthropic.types.raw_message_delta_event import Delta

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.wire import ParsedRequest, Said, Turn

USED = {
    'messages', 'system', 'max_tokens', 'stop_sequences', 'tools', 'tool_choice', 'stream',
    'temperature', 'top_p', 'return_token_ids',
}  # fmt: skip
# Fields that do not affect an answer, and those that only describe how long to think
LABELS = {
    'model', 'metadata', 'service_tier', 'cache_control', 'container', 'diagnostics',
    'inference_geo', 'speed', 'user_profile_id', 'workspace_id', 'thinking', 'context_management',
}  # fmt: skip


class Text(anthropic.TextBlockParam, total=False):
    """Text; its citations are not read."""

    citations: Iterable[Any] | None


class ToolResult(anthropic.ToolResultBlockParam, total=False):
    content: str | list[Text]


Block = Annotated[
    Text
    | ToolResult
    | anthropic.ToolUseBlockParam
    | anthropic.ThinkingBlockParam
    | anthropic.RedactedThinkingBlockParam,
    pydantic.Field(discriminator='type'),
    wire.NULLS,
]


class UserMessage(anthropic.UserMessageParam):
    content: str | list[Block]


class AssistantMessage(anthropic.AssistantMessageParam):
    content: str | list[Block]


class SystemMessage(anthropic.SystemMessageParam):
    content: str | list[Block]


Message = Annotated[
    UserMessage | AssistantMessage | SystemMessage, pydantic.Field(discriminator='role')
]


class Request(MessageCreateParamsBase, total=False):
    """A request with the supported kinds of blocks and tools."""

    messages: Required[list[Message]]
    system: str | list[Text]
    tools: list[anthropic.ToolParam]
    stream: bool
    max_tokens: Required[Annotated[int, pydantic.Field(ge=1)]]
    temperature: Annotated[float, pydantic.Field(ge=0, le=1)]
    top_p: Annotated[float, pydantic.Field(ge=0, le=1)]
    return_token_ids: bool  # an extension, as in chat completions


REQUEST = pydantic.TypeAdapter(Request)


def read(body: Any, stops: Sequence[str], serving: bool) -> ParsedRequest:
    """Parse a request, see wire.read."""
    body, hosted = wire.without_hosted_tools(body, (None, 'custom'))
    fields = wire.validate(REQUEST, body)
    ignored = wire.check_fields(body, serving, used=USED | LABELS, plain={}, never={})
    if not fields.get('output_config', {}).keys() - {'effort'}:
        ignored = [name for name in ignored if name != 'output_config']
    choice = fields.get('tool_choice', {}).get('type')
    if choice in ('any', 'tool'):
        ignored.append('tool_choice')
    if serving:
        wire.check_ignored(body, ignored)
    ignored += hosted
    stop = tuple(fields.get('stop_sequences', ()))
    wire.check_stops(stop, stops, serving, 'stop_sequences')
    head = [Said('system', text_of(fields['system']))] if 'system' in fields else []
    tools = fields.get('tools', ()) if choice != 'none' else ()
    return ParsedRequest(
        dialect=wire.load('messages'),
        fields=wire.without_history(fields),
        messages=(*head, *read_messages(fields['messages'])),
        tools=tuple(map(read_tool, tools)),
        stop=stop,
        model=fields['model'],
        token_limit=fields['max_tokens'],
        streams=fields.get('stream', False),
        sampling=wire.sampling_of(fields, serving),
        ignored=tuple(ignored),
    )


def read_tool(tool: Mapping) -> dict:
    """Return a tool as in chat completions."""
    about = {'name': tool['name'], 'description': tool.get('description')}
    about['parameters'] = tool['input_schema']
    about = {name: value for name, value in about.items() if value}
    return {'type': 'function', 'function': about}


def text_of(blocks: str | Iterable[Mapping]) -> str:
    """Return the text of blocks."""
    if isinstance(blocks, str):
        return blocks
    return ''.join(block['text'] for block in blocks if block['type'] == 'text')


def read_messages(messages: Iterable[Mapping]) -> Iterator[Said]:
    """Return messages; each tool result of a user message is a message of its own."""
    for message in messages:
        role, blocks = message['role'], message['content']
        if role == 'assistant':
            yield read_answer(blocks)
            continue
        if not isinstance(blocks, str):
            for block in blocks:
                if block['type'] == 'tool_result':
                    yield Said('tool', text_of(block.get('content', '')))
        text = text_of(blocks)
        if text or isinstance(blocks, str) or all(one['type'] == 'text' for one in blocks):
            yield Said(role, text)


def read_answer(blocks: str | Iterable[Mapping]) -> Said:
    """Return the message of an answer."""
    if isinstance(blocks, str):
        return Said('assistant', blocks)
    thoughts, texts, calls = [], [], []
    for block in blocks:
        kind = block['type']
        if kind == 'text':
            texts.append(block['text'])
        elif kind == 'thinking':
            thoughts.append(block['thinking'])
        elif kind == 'tool_use':
            calls.append({'name': block['name'], 'arguments': block['input']})
    return wire.answer_of(thoughts, texts, calls)


# ---- answers -------------------------------------------------------------------------------------


def write(turn: Turn) -> tuple[anthropic.Message, list[Said]]:
    """Return the message of an answer, and how later requests may repeat it."""
    content: list = []
    if turn.thought:
        block = {'thinking': turn.thought, 'signature': turn.name}
        content.append(anthropic.ThinkingBlock(type='thinking', **block))
    if turn.rest:
        content.append(anthropic.TextBlock(type='text', text=turn.rest))
    for number, call in enumerate(turn.calls):
        block = {'id': f'toolu_{turn.name}_{number}', 'name': call['name']}
        block['input'] = call['arguments']
        content.append(anthropic.ToolUseBlock(type='tool_use', **block))
    reason = 'max_tokens' if turn.answer.finish == 'length' else 'end_turn'
    if turn.calls:
        reason = 'tool_use'
    elif turn.stop is not None:
        reason = 'stop_sequence'
    counts = {'input_tokens': len(turn.answer.prompt), 'output_tokens': len(turn.answer.ids)}
    message = anthropic.Message(
        id=f'msg_{turn.name}',
        type='message',
        role='assistant',
        model=turn.request.model,
        content=content,
        stop_reason=reason,
        stop_sequence=turn.stop if reason == 'stop_sequence' else None,
        usage=anthropic.Usage(**counts),
        **turn.token_ids,
    )
    return message, wire.forms_of(turn)


def encode(message: anthropic.Message, request: ParsedRequest) -> bytes:
    """Return a message as JSON."""
    del request
    return wire.dump(message).encode()


def stream(message: anthropic.Message, request: ParsedRequest) -> bytes:
    """Return a message as server-sent events, with each block in one delta."""
    del request
    data = ((event.type, wire.dump(event)) for event in events(message))
    return ''.join(f'event: {name}\ndata: {line}\n\n' for name, line in data).encode()


def events(message: anthropic.Message) -> Iterator[Any]:
    """Yield the events of a message."""
    reason = {'stop_reason': message.stop_reason, 'stop_sequence': message.stop_sequence}
    usage = message.usage.model_copy(update={'output_tokens': 0})
    empty = dict.fromkeys(reason) | {'content': [], 'usage': usage}
    start = message.model_copy(update=empty)
    yield anthropic.RawMessageStartEvent(type='message_start', message=start)
    for index, block in enumerate(message.content):
        empty, deltas = split(block)
        first = {'index': index, 'content_block': block.model_copy(update=empty)}
        yield anthropic.RawContentBlockStartEvent(type='content_block_start', **first)
        for delta in deltas:
            more = {'index': index, 'delta': delta}
            yield anthropic.RawContentBlockDeltaEvent(type='content_block_delta', **more)
        yield anthropic.RawContentBlockStopEvent(type='content_block_stop', index=index)
    counts = anthropic.MessageDeltaUsage(output_tokens=message.usage.output_tokens)
    end = {'delta': Delta(**reason), 'usage': counts}
    yield anthropic.RawMessageDeltaEvent(type='message_delta', **end)
    yield anthropic.RawMessageStopEvent(type='message_stop')


def split(block: Any) -> tuple[dict, list]:
    """Return (fields of a block at its start, its deltas)."""
    if block.type == 'text':
        return {'text': ''}, [anthropic.TextDelta(type='text_delta', text=block.text)]
    if block.type == 'tool_use':
        text = json.dumps(block.input, ensure_ascii=False)
        return {'input': {}}, [anthropic.InputJSONDelta(type='input_json_delta', partial_json=text)]
    return {'thinking': '', 'signature': ''}, [
        anthropic.ThinkingDelta(type='thinking_delta', thinking=block.thinking),
        anthropic.SignatureDelta(type='signature_delta', signature=block.signature),
    ]
