"""Continuations: a replay from the start of a turn equals the original play."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.extras.vine.forks import Forked, with_forks
from agentrl_jax.machine import sharding
from agentrl_jax.rollout import device
from agentrl_jax.rollout.slots import Schedule

pytestmark = pytest.mark.soak

KEY = tiny.KEY
PER_TURN = (
    'begin part trial anchor rewards penalties turn_stop valid num_actions actions'.split()
)  # [.., K, ...]
PER_TOKEN = 'tokens logprobs attention_mask action_mask turn'.split()  # [.., T]
PER_EPISODE = 'num_turns episode_stop success level'.split()


def forked(name='frozen_lake', *, replay=False):
    """Return episodes with two continuations per turn; replay: with the trunk's streams."""
    listed = with_forks(tiny.episodes(name), continuations=2, max_turns=tiny.BUDGETS['max_turns'])
    if not replay:
        return listed
    forks = listed.extra['forks']
    streams = jnp.broadcast_to(listed.token_stream[:, None], forks.turn.shape)
    return listed.replace(extra={'forks': forks.replace(stream=streams)})


def play(name='frozen_lake', listed=None, **settings):
    listed = forked(name) if listed is None else listed
    settings = dict(temperature=tiny.TEMPERATURES[name]) | settings
    if listed.extra:
        settings['schedule'] = Forked(Schedule(), copies=not settings.get('window'))
    return tiny.play(name, tiny.cloned(name)[0], KEY, listed=listed, **settings)


@functools.cache
def cached_play(name):
    return play(name)


def flat(out):
    """Return the continuations as rows: (rollout [B F], turn [B F], trunk [B F])."""
    turn = out.extra['continuations'].turn
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out.extra['continuations'].rollout)
    return rows, turn.reshape(-1), np.arange(turn.size) // turn.shape[1]


def differences(out):
    """Return fields in which continuations with the trunk's streams differ from the trunk."""
    rows, turns, trunks = flat(out)
    mismatches, checks = [], 0
    for row, (turn, b) in enumerate(zip(turns, trunks, strict=True)):
        if not turn:
            continue
        for name in PER_TOKEN + PER_TURN + PER_EPISODE:
            mine, theirs = (np.asarray(getattr(x, name)) for x in (rows, out))
            mine, theirs = mine[row], theirs[b].copy()
            if name in ('logprobs', 'action_mask'):
                theirs[out.turn[b] < turn] = 0
            elif name in PER_TURN and name != 'begin':
                theirs[:turn] = -1 if name == 'actions' else 0
            checks += 1
            if not np.array_equal(mine, theirs):
                mismatches.append((row, int(turn), name))
    return mismatches, checks


@pytest.mark.parametrize('name', ['frozen_lake', 'sokoban'])
def test_a_continuation_with_the_streams_of_its_trunk_equals_the_trunk(name):
    out, counters = play(name, forked(name, replay=True))
    mismatches, checks = differences(out)
    assert not mismatches and counters['overflow'] == 0
    assert checks > 200


def test_continuations_do_not_change_episodes():
    """Sampler and trainer also agree in continuations."""
    name = 'frozen_lake'
    out, counters = cached_play(name)
    plain, before = tiny.played(name)
    for field in PER_TOKEN + PER_TURN + PER_EPISODE:
        np.testing.assert_array_equal(getattr(out, field), getattr(plain, field), err_msg=field)
    rows, turns, _ = flat(out)
    assert counters['generated'] == before['generated'] + rows.action_mask.sum()
    assert tiny.gap(tiny.cloned(name)[0], rows, tiny.TEMPERATURES[name]) <= 1e-5
    assert rows.action_mask.any(1).sum() == (turns > 0).sum()


def test_exactly_the_reached_turns_are_continued():
    out, _ = cached_play('frozen_lake')
    for count, turn in zip(out.num_turns, out.extra['continuations'].turn, strict=True):
        assert sorted(turn[turn > 0])[::-1] == [k for k in (2, 2, 1, 1) if k < count]
    rows, turns, trunks = flat(out)
    np.testing.assert_array_equal(rows.num_turns > 0, turns > 0)
    assert (rows.num_turns[turns > 0] > turns[turns > 0]).all()
    for row in np.flatnonzero(turns):
        sampled = rows.turn[row][rows.action_mask[row]]
        assert sampled.min() == turns[row] and (rows.rewards[row, : turns[row]] == 0).all()
        before = (out.turn[trunks[row]] < turns[row]) & (out.turn[trunks[row]] >= 0)
        np.testing.assert_array_equal(rows.tokens[row, before], out.tokens[trunks[row], before])
    assert not rows.action_mask[turns == 0].any()


def test_continuations_use_independent_random_streams():
    out, _ = cached_play('frozen_lake')
    rows, turns, trunks = flat(out)
    other = [(rows.tokens[i] != out.tokens[trunks[i]]).any() for i in np.flatnonzero(turns)]
    assert np.mean(other) > 0.5
    fork_streams = np.asarray(forked().extra['forks'].stream)
    streams = np.concatenate([fork_streams.reshape(-1), np.arange(16)])
    assert len(set(streams.tolist())) == len(streams)


def assert_same(one, other, *, exact=True):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if a.dtype == np.float32 and not exact:
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    'slots, serve_rows',
    [(64, 7), (3, 2)],
    ids=['helpers', 'refilled'],
)
def test_schedules_do_not_change_the_samples(slots, serve_rows):
    out, counters = play(slots=slots, serve_rows=serve_rows)
    assert counters['overflow'] == 0
    assert_same(out, cached_play('frozen_lake')[0], exact=False)


@pytest.mark.mesh
def test_meshes_do_not_change_the_samples():
    mesh = sharding.make_mesh(4, 1, 2)
    collect = device.collect_on_mesh(
        mesh,
        tiny.settings(
            max_tokens=160,
            temperature=tiny.TEMPERATURES['frozen_lake'],
            schedule=Forked(Schedule(), copies=True),
        ),
    )
    arguments = (tiny.cloned('frozen_lake')[0], tiny.task('frozen_lake'), forked(), KEY)
    out, counters = jax.device_get(jax.jit(collect, compiler_options=tiny.QUICK)(*arguments))
    assert not counters['overflow'].any()
    assert_same(out, cached_play('frozen_lake')[0], exact=False)


def test_a_window_hides_the_same_turns_from_continuations():
    plain, _ = play(listed=tiny.episodes('frozen_lake'), window=1)
    out, _ = play(listed=forked(replay=True), window=1, slots=24)
    mismatches, checks = differences(out)
    assert not mismatches and checks > 200
    for field in PER_TOKEN:
        np.testing.assert_array_equal(getattr(out, field), getattr(plain, field))
