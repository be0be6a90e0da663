"""A client in all three dialects, for the example harnesses and tests; standard library only.

Conversations have the format of chat completions.
"""

import http.client
import json
import urllib.parse
from typing import Any

from agentrl_jax.envs.hosts.harness.task import Task

PATHS = {'chat': 'chat/completions', 'responses': 'responses', 'messages': 'messages'}


def _calls(message: dict) -> list[dict]:
    """Return the id, name and arguments of the calls in a message."""
    return [{'id': one['id'], **one['function']} for one in message.get('tool_calls') or ()]


def _message(texts: list[str], calls: list[tuple[str, str, str]]) -> dict:
    """Return an answer; calls: (id, name, JSON of its arguments)."""
    message: dict[str, Any] = {'role': 'assistant', 'content': ''.join(texts)}
    if calls:
        message['tool_calls'] = [
            {'id': one, 'type': 'function', 'function': {'name': name, 'arguments': arguments}}
            for one, name, arguments in calls
        ]
    return message


def to_responses(messages: list[dict], fields: dict) -> dict:
    """Return a request of the Responses API."""
    items: list[dict] = []
    for message in messages:
        if message['role'] == 'tool':
            result = {'call_id': message['tool_call_id'], 'output': message['content']}
            items.append({'type': 'function_call_output'} | result)
            continue
        if message['content'] or not message.get('tool_calls'):
            items.append({'role': message['role'], 'content': message['content'] or ''})
        for call in _calls(message):
            items.append({'type': 'function_call', 'call_id': call.pop('id')} | call)
    fields = dict(fields)
    if 'tools' in fields:
        fields['tools'] = [{'type': 'function'} | one['function'] for one in fields['tools']]
    if 'max_tokens' in fields:
        fields['max_output_tokens'] = fields.pop('max_tokens')
    return fields | {'input': items}


def from_responses(body: dict) -> dict:
    """Return the message in a response."""
    texts = [
        part['text']
        for item in body['output']
        if item['type'] == 'message'
        for part in item['content']
    ]
    calls = [
        (item['call_id'], item['name'], item['arguments'])
        for item in body['output']
        if item['type'] == 'function_call'
    ]
    return _message(texts, calls)


def to_messages(messages: list[dict], fields: dict) -> dict:
    """Return a request of the Messages API."""
    body = {'max_tokens': 2**20, 'messages': []} | fields
    for message in messages:
        role, content = message['role'], message['content'] or ''
        if role == 'system':
            body['system'] = content
            continue
        calls = _calls(message)
        if role == 'tool':
            result = {'tool_use_id': message['tool_call_id'], 'content': content}
            role, content = 'user', [{'type': 'tool_result'} | result]
        elif calls:
            content = [{'type': 'text', 'text': content}] if content else []
        for call in calls:
            call['input'] = json.loads(call.pop('arguments'))
            content.append({'type': 'tool_use'} | call)
        body['messages'].append({'role': role, 'content': content})
    if 'tools' in fields:
        tools = [dict(one['function']) for one in fields['tools']]
        body['tools'] = [{'input_schema': tool.pop('parameters')} | tool for tool in tools]
    if 'stop' in fields:
        body['stop_sequences'] = body.pop('stop')
    return body


def from_messages(body: dict) -> dict:
    """Return the message in an answer of the Messages API."""
    texts = [block['text'] for block in body['content'] if block['type'] == 'text']
    calls = [
        (block['id'], block['name'], json.dumps(block['input']))
        for block in body['content']
        if block['type'] == 'tool_use'
    ]
    return _message(texts, calls)


FORMATS = {  # of each dialect: (messages, other fields) -> request, answer -> message
    'chat': (
        lambda messages, fields: {'messages': messages} | fields,
        lambda body: body['choices'][0]['message'],
    ),
    'responses': (to_responses, from_responses),
    'messages': (to_messages, from_messages),
}


class Client:
    """A conversation with the policy."""

    def __init__(self, task: Task, opening: str, dialect: str = 'chat', **more: Any):
        """opening: the first message; more: fields of every request, such as tools."""
        self.messages = [{'role': 'user', 'content': opening}]
        self.more = {'model': task.model} | more
        self.address = urllib.parse.urlsplit(task.base_url)
        self.path = f'{self.address.path}/{PATHS[dialect]}'
        self.write, self.read = FORMATS[dialect]
        self.http = http.client.HTTPConnection(self.address.hostname, self.address.port)

    def ask(self) -> dict | None:
        """Return the policy's next message; None if the request was rejected."""
        body = json.dumps(self.write(self.messages, self.more))
        self.http.request('POST', self.path, body)
        response = self.http.getresponse()
        body_json = json.loads(response.read())
        if response.status != 200:
            return None
        self.messages.append(self.read(body_json))
        return self.messages[-1]
