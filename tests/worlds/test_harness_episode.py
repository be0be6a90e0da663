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
    said = Answer(text)
    said.closed, said.finish = closed, finish
    return said


@pytest.fixture(params=clients.DIALECTS)
def dialect(request):
    """Requests of the test are in this dialect."""
    clients.NOW.dialect = request.param
    yield request.param
    del clients.NOW.dialect


def ask(episode, raw, said, retried=False):
    """Return (observation of the world, message of the client's answer)."""
    name = clients.dialect_now()
    sent = POOL.submit(episode.ask, raw, retried, None, name)
    request = episode.events.get(timeout=5)
    episode.answer(said)
    return request.new, clients.FORMATS[name][1](json.loads(sent.result(5)))


U, V = clients.user('U'), clients.user('V')

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'


def test_calls_become_tool_calls_and_those_that_cannot_be_read_stay_text():
    asked = wire.read(body(U, tools=[clients.TOOL]), ())
    made = wire.complete(answer(f'Let me see. {CALL}'), asked, 'x')
    (choice,) = made.body['choices']
    (call,) = choice['message']['tool_calls']
    assert choice['finish_reason'] == 'tool_calls' and choice['message']['content'] == 'Let me see.'
    assert json.loads(call['function']['arguments']) == {'place': 'here'} and not made.bad_calls
    for bad in ('<tool_call>{"name": "look"', CALL + '<tool_call>'):
        made = wire.complete(answer(bad), asked, 'x')
        message = made.body['choices'][0]['message']
        assert made.bad_calls == 1 and message == {'role': 'assistant', 'content': bad}
    plain = wire.complete(answer(CALL), wire.read(body(U), ()), 'x')
    assert 'tool_calls' not in plain.body['choices'][0]['message']


def test_a_stream_says_the_same():
    options = {'include_usage': True}
    asked = wire.read(body(U, tools=[clients.TOOL], stream_options=options), ())
    made = wire.complete(answer(CALL), asked, 'x').body
    lines = chat.stream(made, asked).decode().strip().split('\n\n')
    assert lines[-1] == 'data: [DONE]'
    first, last, usage = (json.loads(line.removeprefix('data: ')) for line in lines[:-1])
    assert first['choices'][0]['delta']['tool_calls'][0]['function']['name'] == 'look'
    assert last['choices'][0]['finish_reason'] == 'tool_calls'
    assert usage['usage']['total_tokens'] == 0


def said_of(text='A', calls=None, **more):
    return {'role': 'assistant', 'content': text} | ({'tool_calls': calls} if calls else {}) | more


@pytest.mark.parametrize(
    'copy',
    [said_of(' A\n'), said_of([{'type': 'text', 'text': 'A'}]), said_of(refusal=None)],
    ids=str,
)
def test_a_copy_that_says_the_same_goes_on_with_the_conversation(copy):
    episode = Episode()
    shown, _ = ask(episode, body(U), answer('A'))
    assert shown.opens and shown.branch == 0
    shown, _ = ask(episode, body(U, copy, V), answer('B'))
    assert shown.messages == ({'role': 'user', 'content': 'V'},) and not shown.opens


def test_a_copy_of_a_call_may_spell_its_json_otherwise(dialect):
    episode, tools = Episode(), [clients.TOOL]
    _, made = ask(episode, body(U, tools=tools), answer(CALL))
    echo = made
    echo['content'] = ''
    echo['tool_calls'][0]['function']['arguments'] = '{ "place" :"here" }'
    result = {'role': 'tool', 'tool_call_id': echo['tool_calls'][0]['id'], 'content': 'a wall'}
    shown, _ = ask(episode, body(U, echo, result, tools=tools), answer('B'))
    assert [one['role'] for one in shown.messages] == ['tool'] and not shown.opens


@pytest.mark.parametrize('stop', ['A', 'A\n'])
def test_a_stop_string_may_be_cut_or_there_again(stop):
    episode = Episode(stops=('\n',))
    _, made = ask(episode, body(U, stop=['\n']), answer('A\n', closed=False))
    assert made['content'] == 'A'
    shown, _ = ask(episode, body(U, said_of(stop), V), answer('B'))
    assert not shown.opens and not shown.appended


@pytest.mark.parametrize(
    ('later', 'more'),
    [
        ((U, said_of('other'), V), {}),
        ((V, said_of(), V), {}),
        ((U, said_of(), V), {'tools': [clients.TOOL]}),
        (({'role': 'system', 'content': 'S'}, U, said_of(), V), {}),
        ((U, said_of('A and more'), V), {}),  # the policy had ended its turn
    ],
)
def test_what_says_something_else_opens_a_branch_or_is_refused(later, more, dialect):
    episode = Episode(branches=2)
    ask(episode, body(U), answer('A'))
    shown, _ = ask(episode, body(*later, **more), answer('B'))
    assert shown.opens and shown.branch == 1 and len(shown.messages) == len(later)
    shown, _ = ask(episode, body(U, said_of(), V), answer('C'))
    assert shown.branch == 0 and not shown.opens
    with pytest.raises(Refused, match='harness.branches'):
        episode.ask(body(clients.user('W')), False, None, dialect)
    assert [one.code for one in episode.refused] == ['history_rewritten']
    episode.most_branches = 3
    assert ask(episode, body(clients.user('W')), answer('D'), True)[0].opens


def test_a_turn_after_a_thought_opens_a_branch_where_thoughts_are_dropped(dialect):
    said = said_of('<think>so</think>A')
    for drops in (False, True):
        episode = Episode(branches=3, drops=drops)
        ask(episode, body(U), answer('<think>so</think>A'))
        shown, _ = ask(episode, body(U, said, V), answer('B'))
        assert shown.opens == drops and shown.branch == drops
        shown, _ = ask(episode, body(U, said, V, said_of('B'), U), answer('C'))
        assert not shown.opens  # B had no thought


def test_text_added_to_an_answer_that_was_cut_is_part_of_its_message(dialect):
    episode = Episode()
    ask(episode, body(U, max_tokens=1), answer('A', closed=False, finish='length'))
    shown, _ = ask(episode, body(U, said_of('A and more'), V), answer('B'))
    assert shown.appended == ' and more' and not shown.opens
    shown, _ = ask(episode, body(U, said_of('A and more'), V, said_of('B'), U), answer('C'))
    assert not shown.appended and not shown.opens


def test_what_is_sent_again_before_it_was_placed_is_answered_once(dialect):
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


def test_after_the_end_and_from_elsewhere_nobody_is_answered():
    server, episode = endpoint('127.0.0.1', 0), Episode()
    address = server.open(episode)
    client = clients.Client(Task(0, f'{address}/v1', 'k'))
    assert client.reward(reward=0.5)[0] == 200 and episode.reward == {'reward': 0.5}
    for wrong in (dict(reward='much'), dict(reward=1, success='false')):
        status, said = client.reward(**wrong)
        assert status == 400 and said['error']['code'] == 'invalid_reward'
    assert episode.reward == {'reward': 0.5}
    assert client.post('/episodes/guess/v1/chat/completions', body(U))[0] == 410
    assert client.post(f'{client.path}/embeddings', body(U))[0] == 404
    server.close(episode)
    status, said = client.post(f'{client.path}/chat/completions', body(U))
    assert status == 410 and said['error']['code'] == 'episode_over'
    assert client.post('/v1/chat/completions', body(U))[0] == 404  # of no episode


def test_an_episode_whose_request_was_refused_is_freed(dialect):
    """Module-level errors kept its frames alive, and with them all messages."""
    server, episode = endpoint('127.0.0.1', 0), Episode()
    client = clients.Client(Task(0, f'{server.open(episode)}/v1', 'k'))
    episode.refuse(CUT['TURN_BUDGET'])
    status, _ = client.post(f'{client.path}/{clients.PATHS[dialect]}', body(U))
    assert status == CUT['TURN_BUDGET'].status
    server.close(episode)
    gone = weakref.ref(episode)
    del episode

    def is_gone():  # once the answering thread has left its frames
        gc.collect()
        return gone() is None

    until(is_gone)


@pytest.mark.parametrize('error', [SystemExit, KeyboardInterrupt, asyncio.CancelledError, KeyError])
def test_whatever_a_harness_raises_ends_its_episode(error, monkeypatch):
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


def test_an_episode_of_one_conversation_is_drawn_from_the_stream_of_the_episode(dialect):
    for most, plain in ((1, True), (2, False)):
        episode = Episode(branches=most)
        shown, _ = ask(episode, body(U), answer('A'))
        assert (shown.stream == 0) == plain
    later, _ = ask(episode, body(U, said_of(), V), answer('B'))
    again, _ = ask(episode, body(U), answer('C'))
    assert later.stream == shown.stream and again.stream == shown.stream + 1


def test_a_conversation_that_is_refused_leaves_others_their_turns(dialect):
    episode = Episode(branches=2)
    ask(episode, body(U), answer('A'))
    waiting = POOL.submit(episode.ask, body(U, said_of(), V), False, None, dialect)
    episode.events.get(timeout=5)
    episode.refuse(CUT['TOKEN_BUDGET'], branch=True)
    again = functools.partial(episode.ask, body(U, said_of(), V), False, None, dialect)
    for asked in (waiting.result, lambda _: again()):
        with pytest.raises(Refused) as refused:
            asked(5)
        assert refused.value.code == 'context_length_exceeded' and episode.events.empty()
    shown, _ = ask(episode, body(V), answer('B'))
    assert shown.opens and shown.branch == 1
    assert len(episode.refused) == 2
