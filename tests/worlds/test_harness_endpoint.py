"""The endpoint and its clients: calls, fields, bodies, streams and retries."""

import functools
import http.client
import json
import pathlib
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent import futures

import harness_clients as clients
import pytest
from harness_clients import body

from agentrl_jax.envs.hosts.harness import calls, wire
from agentrl_jax.envs.hosts.harness import endpoint as endpoints
from agentrl_jax.envs.hosts.harness.endpoint import Endpoint
from agentrl_jax.envs.hosts.harness.episode import End, Episode
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.world import Answer, Sampling

LOOK = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
U = clients.user('U')


def look_call(**arguments):
    return {'name': 'look', 'arguments': arguments}


HERE = look_call(place='here')

# ---- calls in answers ----------------------------------------------------------------------------


def tagged(written):
    return f'<tool_call>{written}</tool_call>'


@pytest.mark.parametrize(
    ('text', 'expected', 'bad'),
    [
        (LOOK, [HERE], 0),
        (f'Let me see. {LOOK}\n{LOOK}', [HERE, HERE], 0),
        (f'<think>maybe {LOOK}</think>No.', [], 0),
        (f'maybe {LOOK}</think>{LOOK}', [HERE], 0),  # the prompt opened the thought
        (f'<think>maybe {LOOK}', [], 0),  # unclosed thought
        (LOOK.replace('here', '</tool_call>'), [look_call(place='</tool_call>')], 0),
        (LOOK.replace('here', '</think>'), [look_call(place='</think>')], 0),
        (LOOK.replace('here', r'\u003c/tool_call\u003e é'), [
            look_call(place='</tool_call> é')
        ], 0),
        (LOOK.removesuffix('</tool_call>'), [HERE], 0),
        (LOOK.replace('{"place": "here"}', '""'), [look_call()], 0),
        (LOOK.replace('{"place": "here"}', r'"{\"place\": \"here\"}"'), [HERE], 0),
        (LOOK.replace('"arguments"', '"parameters"'), [HERE], 0),
        (tagged('{"name": "look"}'), [look_call()], 0),
        (LOOK.replace('"here"', 'NaN'), [], 1),
        (LOOK.replace('"here"', '1e999'), [], 1),
        (LOOK.replace('here', r'\ud800'), [], 1),
        (LOOK.replace('{"place": "here"}', '"Oslo"'), [], 1),
        (LOOK.replace('{"place": "here"}', '{"a":' * 5000), [], 1),
        (LOOK.replace('"here"', '[' * 200 + ']' * 200), [], 1),
        (LOOK.replace('"look"', '5'), [], 1),
        (tagged('[]') + LOOK, [HERE], 1),
        (tagged('{"name": "look", "arguments": {}}}'), [], 1),
    ],
)  # fmt: skip
def test_calls_are_the_objects_in_tags_after_the_last_thought(text, expected, bad):
    """Drafts in thoughts counted as calls, and a tag inside a string cut its call."""
    assert calls.find_calls(text, 'tags', {'look'})[1:] == (expected, bad)


@pytest.mark.parametrize(
    ('text', 'expected', 'bad'),
    [
        ('{"name": "look", "parameters": {"place": "here"}}', [HERE], 0),
        ('See: {"type": "function", "name": "look", "arguments": {"place": "here"}}\n', [HERE], 0),
        ('<think>{"name": "look", "parameters": {}}</think>No.', [], 0),
        ('{"name": "Bob", "age": 3}', [], 0),
        ('{"name": "Bob", "parameters": {}}', [], 0),
        ('{"a": {"name": "look", "parameters": {}}}', [], 0),
        ('{"name": ["look"], "parameters": {}}', [], 0),
        ('{"name": "look", "parameters": {} ', [], 1),
        ('{"name": "look", "parameters": {"place": NaN}}', [], 1),
        ('{"name": "look", "parameters": {}} or not', [], 1),
        ('<|python_tag|>{"name": "Bob", "parameters": {}}', [], 1),
        ('<|python_tag|>{"name": "look", "param', [], 1),
    ],
)
def test_an_object_is_a_call_if_it_names_a_known_tool_and_has_parameters(text, expected, bad):
    """Any JSON answer with a name counted as a call."""
    assert calls.find_calls(text, 'object', {'look'})[1:] == (expected, bad)


@pytest.mark.parametrize('dialect', clients.DIALECTS)
def test_a_call_of_an_answer_is_the_same_call_in_a_history(dialect):
    write, read = clients.FORMATS[dialect]
    request = wire.read(body(U, tools=[clients.TOOL], dialect=dialect), (), dialect)
    for arguments in ('""', 'null', r'"{\"place\": \"here\"}"', '{"place": "</tool_call>"}'):
        answer = Answer(LOOK.replace('{"place": "here"}', arguments))
        completion = wire.complete(answer, request, 'x')
        message = read(json.loads(request.dialect.encode(completion.body, request)))
        assert isinstance(json.loads(message['tool_calls'][0]['function']['arguments']), dict)
        again = wire.read(body(U, message, U, dialect=dialect), (), dialect)
        assert again.messages[1] == completion.forms[0]


# ---- fields of requests --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('more', 'ignored'),
    [
        ({'temperature': 0}, ['temperature']),
        ({'top_p': 0.9, 'seed': 3, 'top_k': 5}, ['top_p', 'seed', 'top_k']),
        ({'top_k': -1, 'min_p': 0.0, 'presence_penalty': 0, 'logit_bias': {}}, []),
        ({'repetition_penalty': 1.0, 'n': 1, 'user': 'me', 'metadata': {'a': 'b'}}, []),
        ({'parallel_tool_calls': True, 'tool_choice': 'auto', 'store': False}, []),
        ({'tool_choice': 'required'}, ['tool_choice']),
        ({'tool_choice': {'type': 'function', 'function': {'name': 'look'}}}, ['tool_choice']),
        ({'response_format': {'type': 'text'}}, []),
        ({'chat_template_kwargs': {'enable_thinking': False}}, ['chat_template_kwargs']),
        ({'logprobs': True, 'top_logprobs': 5}, ['top_logprobs']),
        ({'a_new_field': 0}, ['a_new_field']),
    ],
    ids=str,
)
def test_each_field_is_used_reported_or_rejected_by_name(more, ignored):
    """Unknown fields were dropped silently, and a served policy ignored temperature and top_p."""
    assert list(wire.read(body(U, **more), ()).ignored) == ignored
    unsupported = [name for name in ignored if name not in wire.SAMPLING]
    if unsupported:
        with pytest.raises(Refused) as error:
            wire.read(body(U, **more), (), serving=True)
        assert error.value.status == 400 and error.value.param == unsupported[0]
        assert unsupported[0] in str(error.value)
    else:
        assert not wire.read(body(U, **more), (), serving=True).ignored


def test_a_served_request_has_its_sampling_settings():
    raw = body(U, temperature=0.0, top_p=0.5, seed=7)
    assert wire.read(raw, (), serving=True).sampling == Sampling(0.0, 0.5, 7)
    assert wire.read(raw, ()).sampling is None
    assert wire.read(body(U), (), serving=True).sampling is None


@pytest.mark.parametrize(
    ('more', 'param'),
    [
        ({'temperature': -1}, 'temperature'),
        ({'seed': 0.5}, 'seed'),
        ({'max_tokens': 0}, 'max_tokens'),
        ({'max_completion_tokens': True}, 'max_completion_tokens'),
        ({'n': 2}, 'n'),
        ({'functions': [{'name': 'look'}]}, 'functions'),
        ({'tool_choice': 'sometimes'}, 'tool_choice'),
        ({'tools': [{'type': 'custom', 'custom': {'name': 'x'}}]}, 'tools'),
        ({'stream': 'yes'}, 'stream'),
        ({'stop': '###'}, 'stop'),
        ({'messages': 5}, 'messages'),
        ({'messages': []}, 'messages'),
        ({'messages': [U, {'role': 'assistant', 'content': 'A'}]}, 'messages'),
        ({'messages': [{'role': 'elf', 'content': ''}]}, 'messages'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages'),
        ({'messages': [{'role': 'assistant', 'tool_calls': 5}, U]}, 'messages'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': None}]}]}, 'messages'),
        ({'messages': [{'role': 'assistant', 'function_call': {'name': 5}}, U]}, 'messages'),
    ],
    ids=str,
)
def test_an_invalid_field_is_an_error_with_its_name(more, param):
    with pytest.raises(Refused) as error:
        wire.read(body(U, **more), (), serving=True)
    assert (error.value.status, error.value.param) == (400, param)
    assert error.value.body()['error']['param'] == param


@pytest.mark.parametrize('raw', [b'{"messages": [], "x": NaN}', b'[' * 5000, b'\xff', b''])
def test_a_body_that_is_not_json_is_an_error(raw):
    with pytest.raises(Refused) as error:
        wire.read(raw, ())
    assert error.value.code == 'invalid_json'


def test_a_legacy_function_call_stays_a_call():
    """The call was dropped, but its result was kept."""
    for sent, arguments in (('', {}), ('{"place"', '{"place"')):
        call = {'name': 'look', 'arguments': sent}
        result = {'role': 'function', 'name': 'look', 'content': 'a wall'}
        history = [U, {'role': 'assistant', 'content': None, 'function_call': call}, result]
        request = wire.read(body(*history), ())
        assert json.loads(request.messages[1].calls) == [{'name': 'look', 'arguments': arguments}]
        assert request.messages[2].role == 'tool' and not request.ignored


def test_unused_keys_of_messages_are_reported():
    reply = {'role': 'assistant', 'content': 'A', 'refusal': None, 'annotations': [], 'audio': None}
    assert not wire.read(body(U, reply, U), ()).ignored
    named = [{**U, 'name': 'Ann'}, {**reply, 'reasoning_content': 'so'}, U]
    request = wire.read(body(*named), ())
    assert request.ignored == ('messages.name', 'messages.reasoning_content')


# ---- bodies and methods --------------------------------------------------------------------------


@functools.cache
def server():
    return Endpoint()


class Policy:
    """An episode that a thread answers once `go` is set."""

    def __init__(self, branches=1, texts='ABCDEFGH', dialect='chat'):
        self.server, self.episode = server(), Episode(branches=branches)
        self.base, self.dialect = self.server.open(self.episode), dialect
        self.body = functools.partial(body, dialect=dialect)
        self.parts = urllib.parse.urlsplit(self.base)
        self.path = f'{self.parts.path}/v1/{clients.PATHS[dialect]}'
        self.go, self.requests = threading.Event(), queue.SimpleQueue()
        self.go.set()
        threading.Thread(target=self.answer, args=(texts,), daemon=True).start()

    def answer(self, texts):
        for text in texts:
            event = self.episode.events.get()
            if isinstance(event, End):
                return
            self.requests.put(event)
            self.go.wait()
            if self.episode.pending is not None:
                self.episode.answer(Answer(text))

    def connect(self):
        return http.client.HTTPConnection(self.parts.hostname, self.parts.port, timeout=30)

    def send(self, raw):
        """Open a connection and send bytes."""
        connection = socket.create_connection((self.parts.hostname, self.parts.port), 30)
        connection.sendall(raw)
        return connection

    def request(self, raw, more=''):
        """Return the bytes of a request."""
        head = f'POST {self.path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(raw)}\r\n\r\n'
        return head.encode() + raw

    def leave(self, raw):
        """Send a request and close the connection before the answer."""
        with self.send(self.request(raw)):
            self.requests.get(timeout=10)

    def post(self, raw, headers=None, **more):
        connection = self.connect()
        connection.request('POST', self.path, raw, headers or {}, **more)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def close(self):
        self.episode.events.put(End())
        self.go.set()
        self.server.close(self.episode)


@pytest.fixture(params=clients.DIALECTS)
def policy(request):
    instance = Policy(dialect=request.param)
    yield instance
    instance.close()


def content_of(result):
    status, response = result
    assert status == 200, response
    read = {'choices': 'chat', 'output': 'responses', 'content': 'messages'}
    (dialect,) = (read[name] for name in read if name in response)
    return clients.FORMATS[dialect][1](response)['content']


def test_chunked_bodies_are_read(policy):
    """Chunked bodies of any size got 413: httpx with a generator, node's fetch."""
    raw, headers = policy.body(U), {'Transfer-Encoding': 'chunked'}
    parts = [raw[i : i + 7] for i in range(0, len(raw), 7)]
    assert content_of(policy.post(iter(parts), headers, encode_chunked=True)) == 'A'


@pytest.mark.parametrize(
    ('head', 'status'),
    [
        (b'Content-Encoding: gzip\r\n\r\n', 415),
        (b'Content-Length: 99999999999\r\n\r\n', 413),
        (b'\r\n', 400),
    ],
    ids=str,
)
def test_a_body_that_cannot_be_read_is_an_error(policy, head, status):
    start = f'POST {policy.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n'.encode()
    with policy.send(start + head) as connection, connection.makefile('rb') as answer:
        assert answer.readline().split()[1] == b'%d' % status


@pytest.mark.parametrize(
    ('method', 'path', 'status', 'allowed'),
    [
        ('GET', '/health', 200, None),
        ('GET', '{base}/v1/chat/completions', 405, 'POST'),
        ('GET', '{base}/v1/models?limit=1', 200, None),
        ('GET', '{base}/v1/nothing', 404, None),
        ('POST', '/episodes/guess/v1/chat/completions', 410, None),
        ('POST', '/episodes/guess/reward', 410, None),
    ],
)
def test_a_wrong_method_returns_405_and_the_allowed_one(policy, method, path, status, allowed):
    connection = policy.connect()
    connection.request(method, path.format(base=policy.parts.path), b'{}')
    response = connection.getresponse()
    assert (response.status, response.headers['Allow']) == (status, allowed)
    assert response.read() and not response.will_close


# ---- streams -------------------------------------------------------------------------------------


def test_a_stream_has_headers_and_comments_before_its_first_token(policy, monkeypatch):
    """No byte was sent before the answer, and node's fetch times out after 300 s."""
    monkeypatch.setattr(endpoints, 'STREAM_AFTER_S', 0.05)
    monkeypatch.setattr(endpoints, 'COMMENT_EVERY_S', 0.05)
    policy.go.clear()
    connection = policy.connect()
    connection.request('POST', policy.path, policy.body(U, stream=True))
    response = connection.getresponse()
    assert response.headers['Content-Type'] == 'text/event-stream'
    comments = [response.readline() for _ in range(4)]
    assert comments == [b': waiting for the policy\n', b'\n'] * 2
    policy.go.set()
    *events, end = filter(None, response.read().split(b'\n\n'))
    assert sum(b'"A"' in event for event in events) >= 1
    ends = {'chat': b'data: [DONE]', 'responses': b'event: response.completed'}
    assert end.startswith(ends.get(policy.dialect, b'event: message_stop'))
    connection.request('GET', '/health')  # the connection is still open
    assert connection.getresponse().status == 200


def test_an_error_after_the_headers_of_a_stream_is_an_event(policy, monkeypatch):
    monkeypatch.setattr(endpoints, 'STREAM_AFTER_S', 0.05)
    policy.go.clear()
    connection = policy.connect()
    connection.request('POST', policy.path, policy.body(U, stream=True))
    response = connection.getresponse()
    policy.episode.refuse(Refused(400, 'context_length_exceeded', 'too long'))
    events = [line for line in response.read().split(b'\n') if line[:5] == b'data:']
    error = json.loads(events[0][5:])
    assert error.get('error', error)['code'] == 'context_length_exceeded'
    assert (events[-1] == b'data: [DONE]') == (policy.dialect == 'chat')
    status, error = policy.post(policy.body(U, clients.user('V'), stream=True))
    assert (status, error['error']['code']) == (400, 'context_length_exceeded')


# ---- retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_reconnects_and_repeats_its_request_gets_its_answer(policy, stream):
    """Without OpenAI's header it counted as a rewritten history."""
    raw = policy.body(U, stream=stream)
    policy.go.clear()
    policy.leave(raw)
    with futures.ThreadPoolExecutor(1) as pool:
        again = pool.submit(raw_post, policy, raw)
        time.sleep(0.1)
        policy.go.set()
        answer = again.result(10)
    assert b'200 OK' in answer and b':"A"' in answer.replace(b': ', b':')
    assert policy.requests.empty() and len(policy.episode.branches) == 1


def raw_post(policy, raw):
    with policy.send(policy.request(raw, 'Connection: close\r\n')) as connection:
        with connection.makefile('rb') as answer:
            return answer.read()


def test_an_answer_is_stored_until_it_is_delivered(policy):
    raw = policy.body(U)
    policy.go.clear()
    policy.leave(raw)
    policy.go.set()
    time.sleep(0.2)
    assert content_of(policy.post(raw)) == 'A'
    status, error = policy.post(raw)  # the second answer was delivered
    assert (status, error['error']['code']) == (400, 'history_rewritten')


def test_equal_requests_of_two_waiting_clients_get_two_answers():
    policy = Policy(branches=2)
    policy.go.clear()
    with futures.ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(policy.post, body(U)) for _ in range(2)]
        time.sleep(0.1)
        policy.go.set()
        assert sorted(content_of(one.result(10)) for one in answers) == ['A', 'B']
    policy.close()


def test_a_wildcard_address_is_not_published():
    everywhere = Endpoint('0.0.0.0')
    assert '0.0.0.0' not in everywhere.url
    host = urllib.parse.urlsplit(everywhere.url).hostname
    with socket.create_connection((host, everywhere.port), 10):
        episode = Episode()
    address = everywhere.open(episode, 'https://proxy:8443/')
    assert address.startswith('https://proxy:8443/episodes/')


# ---- node ---------------------------------------------------------------------------------------

# make harness-clients installs it
AI_SDK = """
import {generateText, streamText, tool, stepCountIs, jsonSchema} from 'ai';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {createAnthropic} from '@ai-sdk/anthropic';
import {createOpenAI} from '@ai-sdk/openai';
const baseURL = process.argv[1], apiKey = 'k';
const look = tool({
  description: 'Looks.',
  inputSchema: jsonSchema({type: 'object', properties: {place: {type: 'string'}}}),
  execute: async ({place}) => `A wall is ${place}.`,
});
const found = [];
globalThis.AI_SDK_LOG_WARNINGS = false;
for (const model of [
  createOpenAICompatible({name: 'own', baseURL, apiKey})('policy'),
  createOpenAI({baseURL, apiKey}).responses('policy'),
  createAnthropic({baseURL, apiKey}).messages('policy'),
  createOpenAI({baseURL, apiKey}).chat('policy'),
]) {
  const prompt = `U${found.length}`, more = {tools: {look}, stopWhen: stepCountIs(3)};
  const used = await generateText({model, prompt, maxOutputTokens: 20, ...more});
  found.push(used.steps[0].toolResults[0].output, used.text);
  const streamed = streamText({model, prompt: `V${found.length}`, ...more});
  for await (const part of streamed.textStream) found.push(part);
}
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(
    not (pathlib.Path(sys.prefix) / 'node_modules' / 'ai').exists(),
    reason='the AI SDK is not installed (make harness-clients)',
)
def test_the_ai_sdk_calls_tools_and_streams(monkeypatch):
    monkeypatch.setattr(endpoints, 'STREAM_AFTER_S', 0.01)
    thought = f'<think>{LOOK}</think>'
    policy = Policy(branches=8, texts=4 * [thought + LOOK, 'A', thought + LOOK, 'B'])
    command = ['node', '--input-type=module', '-e', AI_SDK, f'{policy.base}/v1']
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=sys.prefix, check=False
    )
    assert process.returncode == 0, process.stderr
    chat, parts = ['A wall is here.', 'A', thought, 'B'], ['A wall is here.', 'A', 'B']
    assert json.loads(process.stdout) == [*chat, *parts, *parts, *chat]
    assert len(policy.episode.branches) == 8
    policy.close()
