"""Rollouts that continue across updates: which weights sample which turns; nothing else changes."""

import collections
import functools
import itertools
import json
import shutil
import threading

import host_worlds as hosts
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax import train
from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.records import run_log
from agentrl_jax.rollout import versions, windows
from agentrl_jax.rollout.keepers import Pool
from agentrl_jax.rollout.replies import LoggedPool, ReplyLog, read_log
from agentrl_jax.run.streams import LEVELS, Streams
from agentrl_jax.types import Episodes, EpisodeStop

STEPS, EPISODES = 5, 16


@functools.cache
def weights(version):
    """Weights of a step: the previous step's with a small change, as after an update."""
    params, keys = tiny.cloned('frozen_lake')[0], itertools.count(100 * version)

    def moved(x):
        return x + 0.02 * version * jax.random.normal(jax.random.key(next(keys)), x.shape)

    return jax.tree.map(moved, params)


def draw(step):
    row = np.arange(EPISODES, dtype=np.int32)
    return Episodes(
        level=(row // 4 + 3 * step) % 16, token_stream=step * EPISODES + row, world_stream=row
    )


class Recorded(Pool):
    """Records the order in which episodes start."""

    def __init__(self, make, read):
        super().__init__(make, read)
        self.started = []

    def submit(self, request):
        self.started += [] if request.actions else [request.stream]
        super().submit(request)


def play(make, folder, *, staleness=2, pool=None, replay=None, first=0, **settings):
    """Return (rollouts of steps on the host, their player)."""
    task, conversation = hosts.conversation_of(hosts.Tests())
    recorded = Recorded(make, conversation.prompt)
    collect = hosts.collector(conversation, make, pool=recorded, **settings)
    worlds, rollouts, shared = collect.worlds, [], 0
    folder.mkdir(exist_ok=True)
    worlds.log = ReplyLog(folder / 'replies.jsonl')
    worlds.log.about = {'split': 'train'}
    worlds.version_log = folder / 'versions.jsonl'
    if replay:
        worlds.pool = (pool or functools.partial(Pool, make))(conversation.prompt)
        worlds.plan = functools.partial(versions.Plan, replay / 'versions.jsonl')
    try:
        for step in range(first, STEPS):
            more = dict(step=step, last=STEPS - 1, staleness=staleness)
            rollout, counters = collect.collect_ahead(weights(step), task, draw, tiny.KEY, **more)
            rollouts.append(jax.device_get(rollout))
            shared += worlds.ahead.counted['shared']
        worlds.ahead.shared = shared
        return rollouts, worlds.ahead
    finally:
        worlds.close()
        worlds.log.close()


@pytest.fixture(scope='module')
def slow(tmp_path_factory):
    """(rollouts, folder of the logs) of slow environments."""
    folder = tmp_path_factory.mktemp('slow')
    return play(hosts.troubled(1, latency=0.004), folder)[0], folder


def version_of(rollouts):
    """Return the versions of turns, int32 [steps, B, K]; -1 past the end."""
    turns = np.arange(rollouts[0].part.shape[1])
    return np.array(
        [
            np.where(turns < out.num_turns[:, None], step - out.staleness, -1)
            for step, out in enumerate(rollouts)
        ]
    )


@pytest.mark.parametrize('staleness', [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_batch_has_the_groups_of_its_step_and_no_turn_exceeds_the_staleness(staleness, tmp_path):
    rollouts, player = play(hosts.Echo, tmp_path, staleness=staleness)
    for step, out in enumerate(rollouts):
        np.testing.assert_array_equal(out.level, draw(step).level)
        assert (out.episode_stop != EpisodeStop.NONE).all() and (out.num_turns > 0).all()
        assert out.staleness.min() >= 0 and out.staleness.max() <= min(staleness, step)
        assert out.action_mask.any(1).all()
    version = version_of(rollouts)
    assert {0, 1} <= set((np.arange(STEPS)[:, None, None] - version)[version >= 0])
    later = (version[:, :, 1:] >= version[:, :, :-1]) | (version[:, :, 1:] < 0)
    assert later.all()  # versions of an episode increase
    assert player.calls.pool.started == [*range(STEPS * EPISODES)]
    prefix = len(player.task.prefix)
    assert player.shared > STEPS * EPISODES // 2 * prefix  # most copy it and their first prompt
    assert not player.calls.under_way and not player.prompts
    logged = [json.loads(line) for line in (tmp_path / 'versions.jsonl').open()]
    assert [line['step'] for line in logged] == [*range(STEPS)]
    for line, expected in zip(logged, version, strict=True):
        assert line['versions'] == [[int(x) for x in row if x >= 0] for row in expected]
    lines = read_log(tmp_path / 'replies.jsonl')
    assert all(line['stream'] // EPISODES == line['step'] for line in lines)


def test_constant_weights_give_the_same_episodes_as_no_staleness(tmp_path, monkeypatch):
    """Bit for bit: no episode is preferred, cut or restarted because of its duration."""
    still = weights(0)
    monkeypatch.setitem(globals(), 'weights', lambda version: still)
    alone, _ = play(hosts.Echo, tmp_path / 'alone', staleness=0)
    ahead, _ = play(hosts.troubled(5, latency=0.004), tmp_path / 'ahead', staleness=2)
    assert any(out.staleness.any() for out in ahead)
    for one, other in zip(alone, ahead, strict=True):
        hosts.assert_same(one, other.replace(staleness=one.staleness))
        assert not one.staleness.any()


@pytest.mark.soak
def test_log_probabilities_match_the_weights_of_each_turn(slow):
    """Checked with an independent cached forward pass, turn by turn with the logged weights."""
    rollouts, _ = slow
    config, version = tiny.config(), version_of(rollouts)
    assert len({tuple(row[row >= 0]) for row in version.reshape(-1, version.shape[2])}) > 8

    @jax.jit
    def read(params, tokens, positions, cache):
        hidden, cache = config.forward_cached(params, tokens, positions, cache, None)
        scores = jax.nn.log_softmax(config.logits(params, hidden[:, :-1]) / 1.4)
        selected = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2)[..., 0]
        return jnp.pad(selected, ((0, 0), (1, 0))), cache

    for step, out in enumerate(rollouts):
        length = out.tokens.shape[1]
        cache, logprobs = config.init_cache(EPISODES, length), np.zeros(out.logprobs.shape)
        for k, which in itertools.product(range(version.shape[2]), range(step + 1)):
            in_turn = (out.turn == k) & (version[step, :, k] == which)[:, None]
            if in_turn.any():
                positions = np.where(in_turn, np.arange(length), length)
                selected, cache = read(weights(which), out.tokens, positions, cache)
                logprobs[in_turn] = selected[in_turn]
        gap = np.abs(np.where(out.action_mask, logprobs - out.logprobs, 0.0))
        assert gap.max() < 1e-5 and out.action_mask.sum() > 50


@pytest.mark.soak
def test_a_window_has_one_version(tmp_path):
    """It is read again at every turn, including its prefix, so trainer and sampler agree."""
    rollouts, player = play(hosts.Echo, tmp_path, window=2)
    context = windows.Context.of(player.task, 2, hosts.SETTINGS['max_response'])
    version = version_of(rollouts)
    assert (version[:, :, 1:] > version[:, :, :-1])[version[:, :, 1:] >= 0].any()
    for out, turn_versions in zip(rollouts, version, strict=True):
        turn_windows = jax.jit(context.windows)(out)
        rows = windows.split_turns((out.tokens, out.attention_mask), turn_windows)
        for which in np.unique(turn_versions[turn_versions >= 0]):
            scores, _ = tiny.score(1.4)(weights(int(which)), *rows)
            scores = windows.scatter_back(scores, turn_windows, out.tokens.shape[1])
            same_version = np.take_along_axis(turn_versions, np.maximum(out.turn, 0), 1) == which
            gap = np.abs(np.where(out.action_mask & same_version, scores - out.logprobs, 0.0))
            assert gap.max() < 1e-5


def test_the_same_versions_give_the_same_bits_for_any_timing(slow, tmp_path):
    rollouts, folder = slow
    at_once, _ = play(hosts.Echo, tmp_path / 'at_once', replay=folder)
    slower, _ = play(hosts.troubled(2, latency=0.008), tmp_path / 'slower', replay=folder, poll=1)
    for other in (at_once, slower):
        for one, two in zip(rollouts, other, strict=True):
            hosts.assert_same(one, two)
    text = (folder / 'versions.jsonl').read_text()
    assert (tmp_path / 'slower' / 'versions.jsonl').read_text() == text
    lines = read_log(folder / 'replies.jsonl')
    logged, _ = play(
        lambda: 1 / 0,
        tmp_path / 'logged',
        replay=folder,
        pool=lambda read: LoggedPool(lines, read),
    )
    jax.tree.map(np.testing.assert_array_equal, logged, rollouts)


class Held(hosts.Echo):
    """The last item of the second step waits until the first step is over."""

    over, items = threading.Event(), ()

    def reset(self, item):
        if item == self.items[(EPISODES // 4 - 1 + 3) % 16]:
            assert self.over.wait(30)
        return super().reset(item)


def test_a_step_waits_only_for_its_episodes(tmp_path, monkeypatch):
    task, conversation = hosts.conversation_of(hosts.Tests())
    Held.items, Held.over = task.env_params.items.tolist(), threading.Event()
    collect = hosts.collector(conversation, Held, slots=EPISODES)
    try:
        for step in (0, 1):
            out, _ = collect.collect_ahead(
                weights(step), task, draw, tiny.KEY, step=step, last=1, staleness=1
            )
            waiting = len(collect.worlds.ahead.calls.under_way)
            assert waiting >= 4 if step == 0 else waiting == 0  # a group waits
            Held.over.set()
        stale = jax.device_get(out.staleness)
        assert not stale[-4:].any() and stale[:-4, 0].any()
    finally:
        Held.over.set()
        collect.worlds.close()


@pytest.mark.soak
def test_faulty_episodes_restart_with_the_weights_of_their_step(tmp_path):
    """There are more of them than slots, so they must not hold slots until they are replayed."""
    failed = collections.Counter()

    class Broken(hosts.Echo):
        deterministic = False

        def step(self, action):
            item = int(self.said[0])
            if failed[item] < 4:  # its full group
                failed[item] += 1
                raise WorldError('broken once')
            return super().step(action)

    policy = hosts.host.RetryPolicy(min_healthy=1.0)
    rollouts, _ = play(Broken, tmp_path, policy=policy)
    assert sum(failed.values()) > 40 and all(out.healthy.all() for out in rollouts)
    again, _ = play(
        lambda: 1 / 0,
        tmp_path / 'again',
        replay=tmp_path,
        pool=lambda read: LoggedPool(read_log(tmp_path / 'replies.jsonl'), read),
    )
    jax.tree.map(np.testing.assert_array_equal, again, rollouts)


def test_invalid_logs_of_versions_are_rejected(slow, tmp_path):
    _, folder = slow
    path = tmp_path / 'versions.jsonl'
    with pytest.raises(ValueError, match='step 0 has 16 episodes, this run has 8'):
        versions.Plan(folder / 'versions.jsonl', 0, 8)
    with pytest.raises(ValueError, match='weights from before step 3 sampled turns of later'):
        versions.Plan(folder / 'versions.jsonl', 3, EPISODES)
    path.write_text('{"step": 0, "versions": [[0], ["a"]]}\n')
    with pytest.raises(ValueError, match='line 1: not a step with one list of integer versions'):
        versions.Plan(path, 0, 2)
    path.write_text('{"step": 0, "versions": [[0], [0]]}\n')
    with pytest.raises(ValueError, match='no line for step 1'):
        versions.Plan(path, 0, 2).last_of(1, 5)


# ---- full runs -----------------------------------------------------------------------------------


def a_point_a_turn(episode):
    """Longer episodes return more."""
    return [1.0] * len(episode.turns)


def assert_levels_are_those_of_the_steps(cfg, folder):
    """The same as without staleness, for any lengths of episodes."""
    built = train.build(cfg).training
    items = built.tasks[0].env_params.items
    first_lines = [row for row in read_log(folder / 'replies.jsonl') if not row['turn']]
    for step in range(cfg.steps):
        (listed,) = built.draw(Streams(cfg.seed).key(LEVELS), step, 0)
        starts = [row for row in first_lines if (row['split'], row['step']) == ('train', step)]
        starts = {row['stream'] - step * EPISODES: row['item'] for row in starts}
        assert starts == dict(enumerate(np.asarray(items)[listed.level].tolist()))


def state_and_rows(cfg, folder):
    rows = micro_runs.without_times(run_log.read_metrics(folder / run_log.METRICS_FILE))
    return micro_runs.saved_state(cfg, folder), rows


def assert_states_are_equal(cfg, one, other):
    """Compare two runs and return their rows of metrics."""
    (state, rows), (again, repeated) = state_and_rows(cfg, one), state_and_rows(cfg, other)
    jax.tree.map(np.testing.assert_array_equal, state, again)
    return rows, repeated


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_a_run_replays_from_its_log_and_resumes_after_a_kill(tmp_path, monkeypatch):
    changes = {
        'rollout.staleness': 2,
        'rollout.slots': 8,
        'steps': 5,
        'checkpoint.every': 1,
        'checkpoint.keep': 9,
        'log.rollouts_every': 1,
        'rollout.max_tokens': 320,
        'env.max_turns': 4,
        'reward.function': 'test_partial_rollouts:a_point_a_turn',
    }
    cfg, calm = micro_runs.config('frozen_lake', **(hosts.OBJECTS | changes)), hosts.Echo
    run, again, killed, repeated = (tmp_path / name for name in 'abcd')
    monkeypatch.setattr(hosts, 'Echo', hosts.troubled(3, calm, latency=0.003))
    assert train.train(cfg, str(run)) == 0
    monkeypatch.setattr(hosts, 'Echo', lambda: 1 / 0)
    assert train.train(cfg, str(again), replay=str(run / 'replies.jsonl')) == 0
    rows, repeats = assert_states_are_equal(cfg, run, again)
    assert rows == repeats
    rows = rows[:-1]
    assert {row['rollout/staleness_max'] for row in rows} <= {0, 1, 2}
    assert any(row['rollout/staleness'] > 0 for row in rows)
    for row in rows:
        np.testing.assert_allclose(row['rollout/return'], row['rollout/turns'], rtol=1e-6)
    assert_levels_are_those_of_the_steps(cfg, run)
    assert all(row['perf/recompiles'] == 0 == row['rollout/restarted'] for row in rows)
    stale = next(row['step'] for row in rows if row['rollout/staleness'] > 0)
    page = (run / 'rollouts' / f'step_{stale:06d}.html').read_text()
    assert 'weights of 1 update ago' in page or 'weights of 2 updates ago' in page

    shutil.copytree(run, killed)
    for step in (3, 4, 5):
        shutil.rmtree(killed / 'checkpoints' / str(step))
    monkeypatch.setattr(hosts, 'Echo', hosts.troubled(4, calm, latency=0.001))
    assert train.train(cfg, str(killed)) == 0
    monkeypatch.setattr(hosts, 'Echo', lambda: 1 / 0)
    assert train.train(cfg, str(repeated), replay=str(killed / 'replies.jsonl')) == 0
    rows, _ = assert_states_are_equal(cfg, killed, repeated)
    assert rows[2]['rollout/restarted'] == 3 * EPISODES and rows[2]['rollout/staleness'] == 0
