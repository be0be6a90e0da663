"""World failures cost at most their episodes, never the run."""

import functools
import itertools
import queue
import threading
import time
import unicodedata
from unittest import mock

import host_worlds as hosts
import jax
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.envs.hosts.world import Messages, Reply, WorldDown, WorldError, shown
from agentrl_jax.rollout import host, keepers, replies, world_calls
from agentrl_jax.rollout.world_calls import WorldsFailed
from agentrl_jax.types import EpisodeStop

LENIENT = host.RetryPolicy(tries=1, min_healthy=0)


@functools.cache
def baseline():
    return hosts.play()[0]


class Broken(hosts.Echo):
    """A world that returns or raises `reply` in its second turn, for odd items."""

    reply = WorldError('broken')

    def reset(self, item):
        self.odd = item % 2
        return super().reset(item)

    def step(self, action):
        good = super().step(action)
        if not self.odd:
            return good
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@pytest.mark.parametrize(
    ('reply', 'field'),
    [
        (WorldError('broken'), 'broken'),
        (KeyError('observation'), 'KeyError'),  # any exception of foreign code
        *[(Reply('a', reward=wrong), 'reward') for wrong in (float('nan'), 1e39, 10**300, True)],
        *[(Reply('a', reward=wrong), 'reward') for wrong in (-1000000.5, 'high')],
        (Reply('a', figures=(1, 1e20)), 'figure'),
        (Reply('a', done=1), 'done'),
        (Reply(None), 'observation'),
        ({'observation': 'a'}, 'observation'),
    ],
)
def test_an_invalid_reply_is_a_fault_of_the_world(reply, field):
    class World(Broken):
        pass

    World.reply = reply
    pool = keepers.Pool(World, lambda *_: None)
    pool.submit(keepers.Request(slot=0, stream=0, item=1))
    first = pool.done.get(timeout=60)
    pool.submit(keepers.Request(slot=0, stream=0, item=1, actions=('go',), replies=(first.reply,)))
    response = pool.done.get(timeout=60)
    pool.close()
    assert not first.fault and field in response.fault and response.reply is None


@pytest.mark.parametrize('repeats', [True, False])
def test_a_faulty_episode_is_dropped_and_the_others_are_unchanged(repeats, tmp_path):
    """A non-deterministic world is not replayed."""

    class World(Broken):
        deterministic = repeats

    policy = host.RetryPolicy(tries=1 if repeats else 9, min_healthy=0)
    out, counters = hosts.play(make=World, policy=policy, log=tmp_path / 'replies')
    faulty = hosts.conversation_of(hosts.Tests())[0].env_params.items[out.level] % 2 == 1
    np.testing.assert_array_equal(out.episode_stop == EpisodeStop.ENV_ERROR, faulty)
    np.testing.assert_array_equal(out.healthy, ~faulty)
    assert counters['hosts/faults'] == faulty.sum() == 8 and counters['hosts/retries'] == 0
    hosts.assert_same(out, baseline(), ~faulty)
    assert np.isfinite(out.rewards).all() and not out.success[faulty].any()
    assert (out.num_turns[faulty] == 1).all()
    assert 'WorldError: broken' in (tmp_path / 'replies').read_text()


def test_a_world_wrongly_marked_as_deterministic_is_detected(tmp_path):
    """Every new world has a different first observation."""
    number = itertools.count()

    class World(Broken):
        def __init__(self):
            self.number = next(number)

        def reset(self, item):
            return f'{super().reset(item)} {self.number}'

    out, counters = hosts.play(
        make=World, policy=host.RetryPolicy(tries=2, min_healthy=0), log=tmp_path / 'replies'
    )
    assert counters['hosts/retries'] == 8 == (~out.healthy).sum()
    assert 'did not repeat reply 0' in (tmp_path / 'replies').read_text()


def test_a_failed_reset_is_retried_even_without_determinism():
    failures = itertools.count()

    class World(hosts.Echo):
        deterministic = False

        def reset(self, item):
            if next(failures) % 3 == 0:
                raise WorldError('not now')
            return super().reset(item)

    out, counters = hosts.play(make=World, policy=host.RetryPolicy(tries=9, min_healthy=0))
    assert counters['hosts/retries'] > 4
    np.testing.assert_array_equal(out.tokens, baseline().tokens)


def test_a_huge_text_is_truncated_and_counted():
    class World(hosts.Echo):
        def words(self):
            return super().words() + ' box' * 500_000

    out, counters = hosts.play(make=World)
    assert out.healthy.all() and counters['hosts/cut'] == 16 + out.num_turns.sum()
    assert out.tokens.shape[1] >= out.attention_mask.sum(1).max()


def test_failed_episodes_are_replayed_if_too_few_are_healthy(capfd):
    """The first worlds are all broken; later worlds are not."""
    number = itertools.count()

    class World(Broken):
        def __init__(self):
            self.broken = next(number) < 8

        def reset(self, item):
            observation = super().reset(item)
            self.odd = self.broken
            return observation

    out, counters = hosts.play(make=World, policy=host.RetryPolicy(tries=1, min_healthy=1))
    assert counters['hosts/faults'] >= 8
    assert 'episodes failed in their environments and are replayed' in capfd.readouterr().err
    hosts.assert_same(out, baseline())


EVIL = 'a\r\ntraining 200/200 success 1.0\x1b[2J\x9b2J\u2028\u202e\ud800 http://me:pass@host/'
HARMLESS = r'a\r\ntraining 200/200 success 1.0\x1b[2J\x9b2J\u2028\u202e\ud800 http://host/'


def test_foreign_text_is_escaped_to_one_line():
    assert shown(EVIL) == shown(HARMLESS) == HARMLESS
    assert shown('naïve 日本 😀 "a" \\n') == 'naïve 日本 😀 "a" \\n'
    assert shown('ws://a:b@c:d@host:1?x=@') == 'ws://host:1?x=@'
    assert str(WorldDown(EVIL)) == HARMLESS
    invisible = ('Cc', 'Cs', 'Zl', 'Zp')
    marks = ('LRE', 'RLE', 'LRO', 'RLO', 'PDF', 'LRI', 'RLI', 'FSI', 'PDI')
    for letter in map(chr, range(0x110000)):
        if unicodedata.category(letter) in invisible or unicodedata.bidirectional(letter) in marks:
            assert shown(letter).isascii() and shown(letter).isprintable(), letter


def test_faults_of_an_older_log_are_escaped_when_it_is_replayed():
    request = keepers.Request(slot=0, stream=0, item=0)
    pool = mock.Mock(done=queue.SimpleQueue())
    quiet = dict(log=replies.ReplyLog(), say=print, asked=lambda: False)
    calls = world_calls.WorldCalls(pool, LENIENT, **quiet)
    calls.ask(request)
    pool.done.put(keepers.Response(request, fault=EVIL))
    assert calls.next(0.0, sampling=False).request is request and calls.last_fault == HARMLESS


def test_an_outage_of_all_worlds_pauses_the_run_and_changes_nothing(capfd):
    """At the start, and within episodes, which are replayed in new worlds."""
    opened, steps, back = threading.Event(), itertools.count(), [None]
    threading.Timer(1.0, opened.set).start()

    class World(hosts.Echo):
        def step(self, action):
            if next(steps) == 10:
                back[0] = time.monotonic() + 0.8
            if back[0] and time.monotonic() < back[0]:
                raise WorldDown('the server is gone')
            return super().step(action)

    def make():
        if not opened.is_set():
            raise WorldDown('connection refused')
        return World()

    out, counters = hosts.play(make=make, policy=host.RetryPolicy(tries=1))
    stderr = capfd.readouterr().err
    assert 'paused: all 8 environments are down (WorldDown: connection refused)' in stderr
    assert 'environments are back' in stderr and counters['hosts/faults'] == 0 and back[0]
    hosts.assert_same(out, baseline())


def test_an_outage_that_lasts_ends_the_run_with_its_reason():
    def make():
        raise WorldDown('connection refused')

    with pytest.raises(WorldsFailed, match='all environments have been .*connection refused'):
        hosts.play(make=make, policy=host.RetryPolicy(outage_s=0.2))
    assert issubclass(WorldsFailed, ValueError)  # commands print one line without a traceback


def test_half_a_surrogate_pair_in_a_reply_is_replaced(tmp_path):
    """The log of such a reply could not be read, so the run could not resume."""

    class World(hosts.Echo):
        def reset(self, item):
            return super().reset(item) + ' \ud83d'

    path = tmp_path / 'replies.jsonl'
    hosts.play(make=World, log=path)
    lines = replies.read_log(path)
    assert lines and all('?' in line['observation'] for line in lines if not line['turn'])
    messages = Messages(({'role': 'user', 'content': ['\ud800']},), tools=({'\ud800': 1},))
    cleaned = keepers.without_surrogates(messages)
    assert cleaned.messages == ({'role': 'user', 'content': ['?']},) and cleaned.tools == (
        {'?': 1},
    )


def test_closing_a_pool_does_not_wait_for_delayed_requests():
    before = threading.active_count()
    pool = keepers.Pool(hosts.Echo, lambda *_: None)
    pool.submit(keepers.Request(slot=0, stream=0, item=1, delay=3600))
    pool.close()
    assert threading.active_count() == before and pool.done.empty()
    pool.submit(keepers.Request(slot=0, stream=0, item=1))  # of the next rollout
    assert pool.done.get(timeout=60).reply is not None
    pool.close()


def test_a_late_reply_of_an_abandoned_world_is_ignored():
    """It would count as the reply to another turn."""
    slow = itertools.count()

    class World(hosts.Echo):
        def step(self, action):
            if next(slow) % 7 == 0:
                time.sleep(0.5)
            return super().step(action)

    out, counters = hosts.play(
        make=World, policy=host.RetryPolicy(timeout_s=0.25, tries=50, min_healthy=0)
    )
    assert counters['hosts/timeouts'] > 0
    hosts.assert_same(out, baseline())


@pytest.mark.soak
def test_host_rollouts_on_a_mesh_match_those_on_one_device():
    """Four devices with two rows each and one device with eight rows give the same tokens."""
    from agentrl_jax.machine import sharding

    task, conversation = hosts.conversation_of(hosts.Tests())
    mesh = sharding.make_mesh(4, 1, 2)
    collect = hosts.collector(conversation, hosts.Echo, mesh=mesh)
    params = sharding.replicate(tiny.cloned('frozen_lake')[0], mesh)
    listed = jax.device_put(tiny.episodes('frozen_lake'), sharding.shard_rows(mesh))
    out, counters = jax.device_get(collect(params, task, listed, tiny.KEY))
    collect.worlds.pool.close()
    assert counters['generated'].sum() == out.action_mask.sum()
    np.testing.assert_allclose(out.logprobs, baseline().logprobs, atol=1e-5, rtol=0)
    for name in ('tokens', 'action_mask', 'turn', 'rewards', 'episode_stop', 'anchor', 'begin'):
        np.testing.assert_array_equal(getattr(out, name), getattr(baseline(), name), err_msg=name)
