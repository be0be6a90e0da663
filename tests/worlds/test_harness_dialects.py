"""The dialects of the endpoint: malformed requests, fields, answers and references."""

import http.client
import json
import sys
import threading
import types
import urllib.parse
from concurrent import futures

import harness_clients as clients
import pydantic
import pytest
from harness_clients import body

from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.endpoint import Endpoint
from agentrl_jax.envs.hosts.harness.episode import Episode
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.world import Answer, Sampling

POOL = futures.ThreadPoolExecutor(4)
NEW = ('responses', 'messages')
U, V = clients.user('U'), clients.user('V')
LOOK = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
THOUGHT = '<think>\nLet me see.\n</think>\n\n'

# ---- malformed requests --------------------------------------------------------------------------

DEEP = b'[' * 5000
RAW = [b'', b'{', b'\xff', b'[1]', b'"x"', b'null', b'5', b'{"a": NaN}', DEEP, b'{"a": 1e999}']
NUMBERS = [0, -1, '5', 1.5, True, [5]]
WRONG = [5, 'x', [5], [[]], {'a': 1}]  # instead of a list of objects
USER = [5, [5], [{}], [{'type': 'image'}], [{'type': 'text'}], [{'type': 'text', 'text': 5}]]
ANSWER = {'role': 'assistant', 'content': 'A'}


def fields(name, values):
    return [{name: value} for value in values]


CALLS = [5, [5], [{'function': {}}], [{'function': {'name': 5}}]]
MALFORMED = {
    'chat': [
        *fields('messages', [*WRONG, [], [U, ANSWER], [{'role': 'elf'}], [{'role': 5}]]),
        *fields('messages', [[{'role': 'user', 'content': one}] for one in USER if one != 5]),
        *fields('messages', [[ANSWER | {'tool_calls': one}, U] for one in CALLS]),
        *fields('max_tokens', NUMBERS),
        *fields('tools', WRONG[:3]),
        {'n': 2},
        {'stream': 'yes'},
        {'stop': '###'},
        {'tool_choice': 'sometimes'},
        {'functions': [{'name': 'look'}]},
    ],
    'responses': [
        *fields('input', [5, [5], [[]], {'a': 1}, [], '', [U, ANSWER], [{'role': 'elf'}]]),
        *fields('input', [[{'role': 'user', 'content': one}] for one in USER]),
        *fields('input', [[{'type': 'function_call', **one}, U] for one in ({}, {'name': 5})]),
        *fields('input', [[{'type': kind}, U] for kind in ('item_reference', 'image', 5)]),
        *fields('input', [[{'type': 'item_reference', 'id': 'msg_other'}, U]]),
        *fields('input', [[{'type': 'reasoning', 'id': 'x', 'summary': [5]}, U]]),
        *fields('max_output_tokens', NUMBERS),
        *fields('tools', [5, 'x', [5], [{'type': 'function'}], [{'type': 'function', 'name': 5}]]),
        *fields('previous_response_id', [5, 'resp_other']),
        {'background': True},
        {'conversation': 'conv_1'},
        {'stream': 'yes'},
        {'instructions': 5},
        {'tool_choice': 'sometimes'},
    ],
    'messages': [
        *fields('messages', [*WRONG, [], [U, ANSWER], [{'role': 'elf'}], [{'role': 5}]]),
        *fields('messages', [[{'role': 'user', 'content': one}] for one in USER]),
        *fields('messages', [[ANSWER | {'content': [{'type': 'tool_use', 'name': 'x'}]}, U]]),
        *fields('messages', [[{'role': 'user', 'content': [{'type': 'tool_result'}]}]]),
        *fields('max_tokens', [*NUMBERS, None]),
        *fields('tools', [5, 'x', [5], [{'name': 'look'}], [{'name': 5, 'input_schema': {}}]]),
        {'tool_choice': 'auto'},
        {'stop_sequences': ['###']},
        {'stop_sequences': [5]},
        {'stream': 'yes'},
        {'system': 5},
        {'system': [{'type': 'image'}]},
    ],
}


def vendor_type(dialect):
    """Return the error type of a vendor."""
    if dialect == 'messages':
        shared = pytest.importorskip('anthropic.types.shared')
        return pydantic.TypeAdapter(shared.ErrorResponse)
    shared = pytest.importorskip('openai.types.shared')
    return pydantic.TypeAdapter(dict[str, shared.ErrorObject])


@pytest.mark.parametrize('dialect', clients.DIALECTS)
def test_malformed_requests_get_vendor_errors_and_change_no_episode(dialect):
    requests = [*RAW]
    for change in MALFORMED[dialect]:
        requests.append(json.dumps(json.loads(body(U, dialect=dialect)) | change).encode())
    assert len(requests) >= 40
    server, episodes = Endpoint(), [Episode(branches=3) for _ in range(2)]
    urls = [urllib.parse.urlsplit(server.open(episode)) for episode in episodes]
    connection = http.client.HTTPConnection(urls[0].hostname, urls[0].port, timeout=30)

    def post(url, raw):
        connection.request('POST', f'{url.path}/v1/{clients.PATHS[dialect]}', raw)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def turns(episode):
        for text in 'AB':
            episode.events.get(timeout=30)
            episode.answer(Answer(text))

    threads = [threading.Thread(target=turns, args=[episode]) for episode in episodes]
    for thread in threads:
        thread.start()
    histories = []
    for url in urls:
        status, answer = post(url, body(U, dialect=dialect))
        histories.append([U, clients.FORMATS[dialect][1](answer), V])
    error = vendor_type(dialect)
    for raw in requests:
        status, answer = post(urls[0], raw)
        assert status == 400, (raw[:300], answer)
        assert error.validate_python(answer) and answer['error']['message'], answer
    for url, history, episode in zip(urls, histories, episodes, strict=True):
        status, answer = post(url, body(*history, dialect=dialect))
        assert status == 200 and clients.FORMATS[dialect][1](answer)['content'] == 'B'
        assert len(episode.branches) == 1
    assert [len(episode.refused) for episode in episodes] == [len(requests), 0]


# ---- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('dialect', 'more', 'ignored'),
    [
        ('responses', {'temperature': 0, 'top_p': 0.9}, ['temperature', 'top_p']),
        ('responses', {'store': False, 'include': ['reasoning.encrypted_content']}, []),
        ('responses', {'reasoning': {'effort': 'low'}, 'truncation': 'disabled'}, []),
        ('responses', {'text': {'format': {'type': 'text'}, 'verbosity': 'low'}}, []),
        ('responses', {'text': {'format': {'type': 'json_object'}}}, ['text']),
        ('responses', {'truncation': 'auto', 'a_new_field': 0}, ['truncation', 'a_new_field']),
        ('responses', {'tool_choice': 'required'}, ['tool_choice']),
        ('messages', {'temperature': 0.5, 'top_k': 5}, ['temperature', 'top_k']),
        ('messages', {'thinking': {'type': 'disabled'}, 'metadata': {'user_id': 'me'}}, []),
        ('messages', {'output_config': {'effort': 'high'}}, []),
        ('messages', {'tool_choice': {'type': 'any'}}, ['tool_choice']),
    ],
    ids=str,
)
def test_each_field_is_used_reported_or_rejected_by_name(dialect, more, ignored):
    raw = body(U, dialect=dialect, **more)
    assert sorted(wire.read(raw, (), dialect).ignored) == sorted(ignored)
    unsupported = [name for name in ignored if name not in wire.SAMPLING]
    if not unsupported:
        served = wire.read(raw, (), dialect, serving=True)
        expected = Sampling(more.get('temperature'), more.get('top_p'))
        assert (served.sampling or Sampling()) == expected and not served.ignored
        return
    with pytest.raises(Refused) as error:
        wire.read(raw, (), dialect, serving=True)
    assert error.value.param == unsupported[0]


@pytest.mark.parametrize('dialect', NEW)
def test_vendor_tools_are_dropped_and_reported(dialect):
    raw = json.loads(body(U, dialect=dialect, tools=[clients.TOOL]))
    raw['tools'].append({'type': 'web_search_20250305', 'name': 'web_search'})
    for serving in (False, True):
        request = wire.read(json.dumps(raw).encode(), (), dialect, serving=serving)
        assert request.tools == (clients.TOOL,) and request.ignored == (
            'tools.web_search_20250305',
        )


@pytest.mark.parametrize('dialect', NEW)
def test_a_dialect_without_its_package_is_an_error_with_the_package_name(dialect, monkeypatch):
    package = {'responses': 'openai', 'messages': 'anthropic'}[dialect]
    monkeypatch.setitem(sys.modules, f'{wire.__package__}.{dialect}', None)
    monkeypatch.delitem(sys.modules, f'{wire.__package__}.{dialect}')
    for name in [name for name in sys.modules if name.split('.')[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    wire.load.cache_clear()
    with pytest.raises(Refused, match=rf'needs {package}: pip install') as error:
        wire.read(body(U, dialect=dialect), (), dialect)
    assert error.value.code == 'missing_package'
    assert wire.read(body(U), ()).messages
    wire.load.cache_clear()


# ---- answers -------------------------------------------------------------------------------------


def respond(text, dialect, *, finish='stop', stops=(), **more):
    """Return (JSON of an answer, its events)."""
    request = wire.read(body(U, dialect=dialect, tools=[clients.TOOL], **more), stops, dialect)
    answer = Answer(text)
    answer.finish, answer.ids, answer.prompt = finish, (5, 6), (1, 2, 3)
    answer.logprobs, answer.pieces = (-0.5, -1.0), (b'a', b'b')
    response = wire.complete(answer, request, 'x')
    lines = request.dialect.stream(response.body, request).decode().split('\n')
    events = [json.loads(line.removeprefix('data: ')) for line in lines if line[:5] == 'data:']
    kinds = [line.removeprefix('event: ') for line in lines if line[:6] == 'event:']
    assert kinds == [event['type'] for event in events]
    return json.loads(request.dialect.encode(response.body, request)), events


@pytest.mark.parametrize(
    ('text', 'kinds'),
    [
        ('A', ['message']),
        (f'{THOUGHT}A', ['reasoning', 'message']),
        (f'{THOUGHT}{LOOK}', ['reasoning', 'function_call']),
        (f'Hm. {LOOK}{LOOK}', ['message', 'function_call', 'function_call']),
        (f'{THOUGHT}{LOOK[:-20]}', ['reasoning', 'message']),  # not a call
        ('', ['message']),
    ],
)
def test_a_stream_has_the_parts_of_the_answer(text, kinds):
    openai = pytest.importorskip('openai.types.responses')
    answer, events = respond(text, 'responses')
    assert [item['type'] for item in answer['output']] == kinds
    assert events[-1]['response'] == answer and answer['status'] == 'completed'
    assert [event['sequence_number'] for event in events] == list(range(len(events)))
    done = [event['item'] for event in events if event['type'] == 'response.output_item.done']
    assert done == answer['output']
    texts = [event['delta'] for event in events if event['type'].endswith('.delta')]
    assert len(texts) == len(kinds) and texts[0].strip() in text
    stream_event = pydantic.TypeAdapter(openai.ResponseStreamEvent)
    assert all(stream_event.validate_python(event).type == event['type'] for event in events)
    anthropic = pytest.importorskip('anthropic.types')
    answer, events = respond(text, 'messages')
    names = {'message': 'text', 'reasoning': 'thinking', 'function_call': 'tool_use'}
    assert [block['type'] for block in answer['content']] == [names[kind] for kind in kinds if text]
    stream_event = pydantic.TypeAdapter(anthropic.RawMessageStreamEvent)
    assert all(stream_event.validate_python(event).type == event['type'] for event in events)
    starts = [event for event in events if event['type'] == 'content_block_start']
    assert [event['index'] for event in starts] == list(range(len(answer['content'])))


@pytest.mark.parametrize('dialect', clients.DIALECTS)
@pytest.mark.parametrize('stream', [False, True])
def test_a_lone_surrogate_in_a_request_does_not_prevent_an_answer(dialect, stream):
    raw = body(U, dialect=dialect, stream=stream, model='\ud800', metadata={'user_id': '\ud800'})
    episode = Episode()
    sent = POOL.submit(episode.ask, raw, False, None, dialect)
    episode.events.get(timeout=30)
    episode.answer(Answer('A'))
    assert b'"A"' in sent.result(30)


def test_stop_reasons_are_in_the_format_of_the_dialect():
    reasons = [('stop', LOOK, 'tool_use'), ('length', 'A', 'max_tokens'), ('stop', 'A', 'end_turn')]
    for finish, text, reason in reasons:
        response, events = respond(text, 'messages', finish=finish)
        assert response['stop_reason'] == events[-2]['delta']['stop_reason'] == reason
    response, _ = respond('A###', 'messages', stops=('###',), stop=['###'])
    assert (response['stop_reason'], response['stop_sequence']) == ('stop_sequence', '###')
    assert response['content'][0]['text'] == 'A'
    response, events = respond('A', 'responses', finish='length')
    assert response['incomplete_details'] == {'reason': 'max_output_tokens'}
    assert events[-1]['type'] == 'response.incomplete'


def test_answers_have_the_ids_and_log_probabilities_of_the_row():
    include = ['message.output_text.logprobs']
    for dialect in clients.DIALECTS:
        more = {'chat': {'logprobs': True}, 'responses': {'include': include}, 'messages': {}}
        request = wire.read(
            body(U, dialect=dialect, return_token_ids=True, **more[dialect]), (), dialect
        )
        answer = Answer('A')
        answer.ids, answer.prompt = (5, 6), (1, 2, 3)
        answer.logprobs, answer.pieces = (-0.5, -1.0), (b'a', b'b')
        response = json.loads(
            request.dialect.encode(wire.complete(answer, request, 'x').body, request)
        )
        assert response['prompt_token_ids'] == [1, 2, 3]
        assert response.get('token_ids') or response['choices'][0]['token_ids'] == [5, 6]
        if dialect == 'responses':
            logprobs = response['output'][0]['content'][0]['logprobs']
            assert [one['logprob'] for one in logprobs] == [-0.5, -1.0]


# ---- earlier answers -----------------------------------------------------------------------------


def exchange(episode, text, **fields):
    """Return (observation, response) of a request of the Responses API."""
    raw = json.dumps({'model': 'm'} | fields).encode()
    sent = POOL.submit(episode.ask, raw, False, None, 'responses')
    request = episode.events.get(timeout=30)
    episode.answer(Answer(text))
    return request.new, types.SimpleNamespace(**json.loads(sent.result(30)))


def test_a_response_continues_an_earlier_one_without_its_instructions():
    episode = Episode(branches=3)
    _, first = exchange(episode, f'{THOUGHT}A', input='U', instructions='S')
    more = dict(input='V', previous_response_id=first.id)
    observation, second = exchange(episode, 'B', instructions='S', **more)
    assert (observation.opens, [one['content'] for one in observation.messages]) == (False, ['V'])
    # A fork with other instructions
    observation, _ = exchange(episode, 'C', instructions='T', **more)
    assert observation.opens and [one['content'] for one in observation.messages] == [
        'T',
        'U',
        f'{THOUGHT}A',
        'V',
    ]
    observation, _ = exchange(
        episode, 'D', input='W', instructions='S', previous_response_id=second.id
    )
    assert (observation.branch, observation.opens, len(observation.messages)) == (0, False, 1)


def test_item_references_are_replaced_by_their_answer():
    episode = Episode(branches=2)
    tools = [{'type': 'function', 'name': 'look'}]
    _, response = exchange(episode, f'{THOUGHT}Hm. {LOOK}', input='U', tools=tools)
    references = [{'type': 'item_reference', 'id': item['id']} for item in response.output]
    assert len(references) == 3
    call = response.output[-1]['call_id']
    result = {'type': 'function_call_output', 'call_id': call, 'output': 'a wall'}
    items = [{'role': 'user', 'content': 'U'}, *references, result]
    observation, _ = exchange(episode, 'A', input=items, tools=tools)
    assert not observation.opens and [one['role'] for one in observation.messages] == ['tool']


def test_tokens_are_counted_up_to_the_newest_answer():
    episode = Episode()
    assert episode.count(body(U, dialect='messages')) < 5
    sent = POOL.submit(episode.ask, body(U, dialect='messages'), False, None, 'messages')
    episode.events.get(timeout=30)
    answer = Answer('A')
    answer.ids, answer.prompt = (1,) * 50, (2,) * 100
    episode.answer(answer)
    sent.result(30)
    history = body(U, ANSWER, clients.user('V' * 40), dialect='messages')
    assert episode.count(history) == 160
    with pytest.raises(Refused):
        episode.count(b'{}')
