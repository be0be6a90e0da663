"""Episodes of a harness: their conversations, repeated requests and rewards."""

import asyncio
import functools
import gc
import json
import time
import weakref
from concurrent import futures

import harness_clients as clients
import numpy as np
import pytest
from harness_clients import body
from waiting import until

from agentrl_jax.envs.hosts.harness import chat, wire, workers
from agentrl_jax.envs.hosts.harness import task as task_of_harness
from agentrl_jax.envs.hosts.harness.episode import Episode
from agentrl_jax.envs.hosts.harness.task import Task, reward_of
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.harness.world import CUT, endpoint
from agentrl_jax.envs.hosts.world import Answer, WorldError

POOL = futures.ThreadPoolExecutor(8)


def answer(text, closed=True, finish='stop'):
    result = Answer(text)
    result.closed, result.finish = closed, finish
    return result


@pytest.fixture(params=clients.DIALECTS)
def dialect(request):
    """Set the dialect of the test's requests."""
    clients.NOW.dialect = request.param
    yield request.param
    del clients.NOW.dialect


def ask(episode, raw, reply, retried=False):
    """Return (observation of the world, message of the client's answer)."""
    name = clients.dialect_now()
    sent = POOL.submit(episode.ask, raw, retried, None, name)
    request = episode.events.get(timeout=5)
    episode.answer(reply)
    return request.new, clients.FORMATS[name][1](json.loads(sent.result(5)))


U, V = clients.user('U'), clients.user('V')

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'


def test_calls_become_tool_calls_and_unreadable_ones_stay_text():
    request = wire.read(body(U, tools=[clients.TOOL]), ())
    result = wire.complete(answer(f'Let me see. {CALL}'), request, 'x')
    (choice,) = result.body['choices']
    (call,) = choice['message']['tool_calls']
    assert choice['finish_reason'] == 'tool_calls' and choice['message']['content'] == 'Let me see.'
    assert json.loads(call['function']['arguments']) == {'place': 'here'} and not result.bad_calls
    for bad in ('<tool_call>{"name": "look"', CALL + '<tool_call>'):
        result = wire.complete(answer(bad), request, 'x')
        message = result.body['choices'][0]['message']
        assert result.bad_calls == 1 and message == {'role': 'assistant', 'content': bad}
    plain = wire.complete(answer(CALL), wire.read(body(U), ()), 'x')
    assert 'tool_calls' not in plain.body['choices'][0]['message']


def test_a_stream_has_the_same_content():
    options = {'include_usage': True}
    request = wire.read(body(U, tools=[clients.TOOL], stream_options=options), ())
    result = wire.complete(answer(CALL), request, 'x').body
    lines = chat.stream(result, request).decode().strip().split('\n\n')
    assert lines[-1] == 'data: [DONE]'
    first, last, usage = (json.loads(line.removeprefix('data: ')) for line in lines[:-1])
    assert first['choices'][0]['delta']['tool_calls'][0]['function']['name'] == 'look'
    assert last['choices'][0]['finish_reason'] == 'tool_calls'
    assert usage['usage']['total_tokens'] == 0


def assistant(text='A', calls=None, **more):
    return {'role': 'assistant', 'content': text} | ({'tool_calls': calls} if calls else {}) | more


@pytest.mark.parametrize(
    'copy',
    [assistant(' A\n'), assistant([{'type': 'text', 'text': 'A'}]), assistant(refusal=None)],
    ids=str,
)
def test_an_equivalent_copy_continues_the_conversation(copy):
    episode = Episode()
    observation, _ = ask(episode, body(U), answer('A'))
    assert observation.opens and observation.branch == 0
    observation, _ = ask(episode, body(U, copy, V), answer('B'))
    assert observation.messages == ({'role': 'user', 'content': 'V'},) and not observation.opens


def test_a_copy_of_a_call_may_format_its_json_differently(dialect):
    episode, tools = Episode(), [clients.TOOL]
    _, message = ask(episode, body(U, tools=tools), answer(CALL))
    echo = message
    echo['content'] = ''
    echo['tool_calls'][0]['function']['arguments'] = '{ "place" :"here" }'
    result = {'role': 'tool', 'tool_call_id': echo['tool_calls'][0]['id'], 'content': 'a wall'}
    observation, _ = ask(episode, body(U, echo, result, tools=tools), answer('B'))
    assert [one['role'] for one in observation.messages] == ['tool'] and not observation.opens


@pytest.mark.parametrize('stop', ['A', 'A\n'])
def test_a_copy_may_contain_or_omit_the_stop_string(stop):
    episode = Episode(stops=('\n',))
    _, message = ask(episode, body(U, stop=['\n']), answer('A\n', closed=False))
    assert message['content'] == 'A'
    observation, _ = ask(episode, body(U, assistant(stop), V), answer('B'))
    assert not observation.opens and not observation.appended


@pytest.mark.parametrize(
    ('later', 'more'),
    [
        ((U, assistant('other'), V), {}),
        ((V, assistant(), V), {}),
        ((U, assistant(), V), {'tools': [clients.TOOL]}),
        (({'role': 'system', 'content': 'S'}, U, assistant(), V), {}),
        ((U, assistant('A and more'), V), {}),  # the policy had ended its turn
    ],
)
def test_a_different_history_opens_a_branch_or_is_rejected(later, more, dialect):
    episode = Episode(branches=2)
    ask(episode, body(U), answer('A'))
    observation, _ = ask(episode, body(*later, **more), answer('B'))
    assert observation.opens and observation.branch == 1 and len(observation.messages) == len(later)
    observation, _ = ask(episode, body(U, assistant(), V), answer('C'))
    assert observation.branch == 0 and not observation.opens
    with pytest.raises(Refused, match='harness.branches'):
        episode.ask(body(clients.user('W')), False, None, dialect)
    assert [one.code for one in episode.refused] == ['history_rewritten']
    episode.most_branches = 3
    assert ask(episode, body(clients.user('W')), answer('D'), True)[0].opens


def test_a_turn_after_a_thought_opens_a_branch_if_thoughts_are_dropped(dialect):
    message = assistant('<think>so</think>A')
    for drops in (False, True):
        episode = Episode(branches=3, drops=drops)
        ask(episode, body(U), answer('<think>so</think>A'))
        observation, _ = ask(episode, body(U, message, V), answer('B'))
        assert observation.opens == drops and observation.branch == drops
        observation, _ = ask(episode, body(U, message, V, assistant('B'), U), answer('C'))
        assert not observation.opens  # B had no thought


def test_text_added_to_a_truncated_answer_is_part_of_its_message(dialect):
    episode = Episode()
    ask(episode, body(U, max_tokens=1), answer('A', closed=False, finish='length'))
    observation, _ = ask(episode, body(U, assistant('A and more'), V), answer('B'))
    assert observation.appended == ' and more' and not observation.opens
    observation, _ = ask(
        episode, body(U, assistant('A and more'), V, assistant('B'), U), answer('C')
    )
    assert not observation.appended and not observation.opens


def test_a_request_that_is_repeated_while_it_waits_is_answered_once(dialect):
    """A repeat of a waiting request was answered twice, in two branches."""
    episode = Episode(branches=4)
    first = POOL.submit(episode.ask, body(U), False, None, dialect)
    episode.events.get(timeout=5)
    waiting = POOL.submit(episode.ask, body(V), False, None, dialect)
    while len(episode._calls) < 2:
        time.sleep(0.01)
    again = POOL.submit(episode.ask, body(V), True, None, dialect)
    episode.answer(answer('A'))
    episode.events.get(timeout=5)
    episode.answer(answer('B'))
    assert waiting.result(5) is again.result(5) is not first.result(5)
    assert len(episode.branches) == 2 and episode.events.empty()


def test_requests_after_the_end_or_to_wrong_paths_are_rejected():
    server, episode = endpoint('127.0.0.1', 0), Episode()
    address = server.open(episode)
    client = clients.Client(Task(0, f'{address}/v1', 'k'))
    assert client.reward(reward=0.5)[0] == 200 and episode.reward == {'reward': 0.5}
    for wrong in (dict(reward='much'), dict(reward=1, success='false')):
        status, response = client.reward(**wrong)
        assert status == 400 and response['error']['code'] == 'invalid_reward'
    assert episode.reward == {'reward': 0.5}
    assert client.post('/episodes/guess/v1/chat/completions', body(U))[0] == 410
    assert client.post(f'{client.path}/embeddings', body(U))[0] == 404
    server.close(episode)
    status, response = client.post(f'{client.path}/chat/completions', body(U))
    assert status == 410 and response['error']['code'] == 'episode_over'
    assert client.post('/v1/chat/completions', body(U))[0] == 404  # of no episode


def test_an_episode_is_freed_after_a_rejected_request(dialect):
    """Module-level errors kept its frames alive, and with them all messages."""
    server, episode = endpoint('127.0.0.1', 0), Episode()
    client = clients.Client(Task(0, f'{server.open(episode)}/v1', 'k'))
    episode.refuse(CUT['TURN_BUDGET'])
    status, _ = client.post(f'{client.path}/{clients.PATHS[dialect]}', body(U))
    assert status == CUT['TURN_BUDGET'].status
    server.close(episode)
    reference = weakref.ref(episode)
    del episode

    def is_gone():  # once the answering thread has left its frames
        gc.collect()
        return reference() is None

    until(is_gone)


@pytest.mark.parametrize('error', [SystemExit, KeyboardInterrupt, asyncio.CancelledError, KeyError])
def test_any_exception_of_a_harness_ends_its_episode(error, monkeypatch):
    def run(task):
        raise error('over')

    monkeypatch.setattr(task_of_harness, 'import_callable', lambda *_: run)
    end = task_of_harness.Call('x:y').play(Task(0, 'http://x', 'k'))
    assert error.__name__ in end.error and 'over' in end.error


@pytest.mark.parametrize(
    ('earned', 'reward'),
    [
        (0.5, (0.5, None)),
        (True, (1.0, True)),
        ([2, np.False_], (2.0, False)),
        ({'reward': 1, 'success': 1.0}, (1.0, True)),
        *[(wrong, None) for wrong in (None, 'good', float('nan'), 1e9, {}, ('a', 'b'))],
        *[((0.0, wrong), None) for wrong in ({'steps': 5}, 'false', 2, float('nan'), np.ones(2))],
    ],
)
def test_rewards_are_numbers_pairs_or_mappings(earned, reward):
    """Any truthy value, such as an info next to the reward, counted as a success."""
    if reward:
        assert reward_of(earned, '') == workers.plain(earned) == reward
        return
    with pytest.raises(WorldError):
        reward_of(earned, '')
    assert earned is None or isinstance(workers.plain(earned), str)  # invalid in a worker, too


def test_a_single_conversation_uses_the_random_stream_of_its_episode(dialect):
    for limit, plain in ((1, True), (2, False)):
        episode = Episode(branches=limit)
        observation, _ = ask(episode, body(U), answer('A'))
        assert (observation.stream == 0) == plain
    later, _ = ask(episode, body(U, assistant(), V), answer('B'))
    again, _ = ask(episode, body(U), answer('C'))
    assert later.stream == observation.stream and again.stream == observation.stream + 1


def test_rejecting_one_conversation_does_not_end_the_others(dialect):
    episode = Episode(branches=2)
    ask(episode, body(U), answer('A'))
    waiting = POOL.submit(episode.ask, body(U, assistant(), V), False, None, dialect)
    episode.events.get(timeout=5)
    episode.refuse(CUT['TOKEN_BUDGET'], branch=True)
    again = functools.partial(episode.ask, body(U, assistant(), V), False, None, dialect)
    for get_result in (waiting.result, lambda _: again()):
        with pytest.raises(Refused) as error:
            get_result(5)
        assert error.value.code == 'context_length_exceeded' and episode.events.empty()
    observation, _ = ask(episode, body(V), answer('B'))
    assert observation.opens and observation.branch == 1
    assert len(episode.refused) == 2
