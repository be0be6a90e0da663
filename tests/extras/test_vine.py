"""Vine: turns against others from the same state; continuations never count as episodes."""

import dataclasses
import functools

import exact_gradients as bench
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms.turn_grpo import TurnGRPO
from agentrl_jax.extras.vine.credit import vine_advantages
from agentrl_jax.extras.vine.forks import with_continuations
from agentrl_jax.extras.vine.section import Forks
from agentrl_jax.extras.vine.vine import Vine
from agentrl_jax.measure import metrics
from agentrl_jax.records import document
from agentrl_jax.rl.advantages import to_tokens
from agentrl_jax.rl.algorithm import Filter
from agentrl_jax.rl.masked import masked_mean

pytestmark = pytest.mark.soak

GROUPS, MEMBERS = 20_000, 4

# ---- advantages ----------------------------------------------------------------------------------


def by_hand(healthy=(True, True), faulty=()):
    """Two members of two turns with rewards 1 2 and 0 4; continuations from turn 1: 3 5 and 1 9."""
    usable = np.ones((2, 2), bool)
    for at in faulty:
        usable[at] = False
    return vine_advantages(
        jnp.array([[1.0, 2], [0, 4]]),
        jnp.array([2, 2]),
        jnp.asarray(healthy),
        jnp.ones((2, 2), jnp.int32),
        jnp.array([[3.0, 5], [1, 9]]),
        jnp.asarray(usable),
        group_size=2,
    )


def test_advantages_by_hand():
    # turn 1 of row 0: 2 against (3 + 5) / 2; turn 0: 1 + (3 + 5 + 2) / 3 = 13/3 against 0 + 14/3
    trunk, forked, count = by_hand()
    np.testing.assert_allclose(trunk, [[-1 / 3, -2], [1 / 3, -1]], rtol=1e-6)
    # continuations: 3 against (5 + 2) / 2, 5 against (3 + 2) / 2; of row 1: 1 - 6.5, 9 - 2.5
    np.testing.assert_allclose(forked, [[-0.5, 2.5], [-5.5, 6.5]], rtol=1e-6)
    assert count.tolist() == [[0, 2], [0, 2]]


def test_a_faulty_continuation_is_excluded_from_means_and_counts():
    # row 1 without the 9: turn 1 is 4 against 1, the value of its start (1 + 4) / 2
    trunk, forked, count = by_hand(faulty=[(1, 1)])
    np.testing.assert_allclose(trunk, [[13 / 3 - 2.5, -2], [2.5 - 13 / 3, 3]], rtol=1e-6)
    np.testing.assert_allclose(forked, [[-0.5, 2.5], [-3, 0]], rtol=1e-6)
    assert count.tolist() == [[0, 2], [0, 1]]
    # without continuations: 4 against the return of the other member from there, 2
    trunk, forked, count = by_hand(faulty=[(1, 0), (1, 1)])
    np.testing.assert_allclose(trunk[1], [4 - 13 / 3, 4 - 2], rtol=1e-6)
    assert not forked[1].any() and count[1].tolist() == [0, 0]


def test_continuations_of_a_faulty_episode_are_excluded():
    trunk, forked, _ = by_hand(healthy=(True, False))
    assert not trunk[1].any() and not forked[1].any()
    np.testing.assert_allclose(trunk[0], [0, -2])  # alone in its group at turn 0


def test_without_continuations_vine_is_turn_grpo():
    rollout = toy.random_rollout(2)
    scores = toy.scores_of(rollout)
    expected = toy.batch_of(TurnGRPO(), rollout, 4, scores)
    plain = toy.batch_of(Vine(), rollout, 4, scores)
    jax.tree.map(np.testing.assert_array_equal, plain, expected)
    none = toy.forked(rollout.replace(num_turns=jnp.ones(8, jnp.int32)), (1,))
    batch = toy.batch_of(Vine(), none, 4, toy.scores_of(with_continuations(none)))
    one = toy.batch_of(TurnGRPO(), none, 4, scores)
    np.testing.assert_allclose(batch.advantages[::2], one.advantages, atol=1e-6)
    assert not batch.mask[1::2].any()


def test_episodes_and_first_turns_of_continuations_train_with_equal_weights():
    rollout = toy.forked(toy.random_rollout(3, turns=3, faulty=(5,)), (2, 2, 1, 1))
    scores = toy.scores_of(with_continuations(rollout))
    batch = toy.batch_of(Vine(scale='none'), rollout, 4, scores)
    more, turn = (
        rollout.extra['continuations'].rollout,
        np.asarray(rollout.extra['continuations'].turn),
    )
    mask = np.asarray(batch.mask).reshape(8, 5, -1)
    trunk = np.asarray(rollout.action_mask & rollout.healthy[:, None])
    np.testing.assert_array_equal(mask[:, 0], trunk)
    first = np.asarray(more.action_mask) & (np.asarray(more.turn) == turn[:, :, None])
    first &= (turn > 0)[:, :, None] & np.asarray(rollout.healthy)[:, None, None]
    np.testing.assert_array_equal(mask[:, 1:], first)
    assert first.any() and not mask[5].any()
    trunk, _, _ = vine_advantages(
        rollout.turn_returns,
        rollout.num_turns,
        rollout.healthy,
        jnp.asarray(turn),
        more.returns,
        (turn > 0) & more.healthy,
        group_size=4,
    )
    weighted = trunk * jnp.array([[1.0, 1 / 3, 1 / 3]])
    expected = to_tokens(weighted, rollout.turn, batch.mask.reshape(8, 5, -1)[:, 0])
    trunks = batch.advantages.reshape(8, 5, -1)[:, 0]
    np.testing.assert_allclose(trunks, expected, rtol=1e-5, atol=1e-6)
    scaled = toy.batch_of(Vine(), rollout, 4, scores)
    assert masked_mean(scaled.advantages**2, scaled.mask) == pytest.approx(1, rel=1e-4)


# ---- bias ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Continued(bench.Played):
    """Episodes with M continuations from the start of every turn except the first."""

    more_actions: np.ndarray  # int [B, K, M]  first actions of the continuations
    more_returns: jax.Array  # float32 [B, K, M]
    more_healthy: np.ndarray  # bool [B, K, M]


def add_continuations(world, episodes, times, rng):
    """Play continuations of episodes."""
    rows, turns = episodes.states.shape
    actions, returns, healthy = (np.zeros((rows, turns, times)) for _ in range(3))
    for k in range(1, turns):
        reached = np.asarray(episodes.num_turns) > k
        for m in range(times):
            fresh = bench.play(world, rows, rng, first=k, state=episodes.states[:, k])
            actions[:, k, m] = fresh.actions[:, 0]
            returns[:, k, m] = fresh.rewards.sum(1) + fresh.outcome
            healthy[:, k, m] = np.asarray(fresh.healthy) & reached
    return Continued(
        **vars(episodes),
        more_actions=actions.astype(int),
        more_returns=jnp.asarray(returns, jnp.float32),
        more_healthy=healthy.astype(bool),
    )


def by_continuations(episodes, members):
    """Return [(turns that train, their advantages [B, K])] of vine."""
    rows, turns, times = episodes.more_actions.shape
    turn = jnp.broadcast_to(jnp.repeat(jnp.arange(turns), times)[None], (rows, turns * times))
    trunk, forked, count = vine_advantages(
        episodes.all_rewards,
        episodes.num_turns,
        episodes.healthy,
        turn,
        episodes.more_returns.reshape(rows, -1),
        jnp.asarray(episodes.more_healthy.reshape(rows, -1)),
        group_size=members,
    )
    weight, forked = 1.0 / (1 + count), forked.reshape(rows, turns, times)
    continued = (
        dataclasses.replace(episodes, actions=episodes.more_actions[:, :, m]) for m in range(times)
    )
    return [(episodes, trunk * weight)] + [
        (one, forked[:, :, m] * weight) for m, one in enumerate(continued)
    ]


@pytest.mark.parametrize('name', ['lookups', 'bonuses', 'faults'])
def test_vine_has_no_bias(name):
    world, rng = bench.WORLDS[name], np.random.default_rng(0)
    episodes = add_continuations(world, bench.play(world, GROUPS * MEMBERS, rng), 2, rng)
    parts = by_continuations(episodes, MEMBERS)
    gradients = sum(bench.group_gradients(*part, world, MEMBERS) for part in parts)
    result = bench.quality(gradients, bench.exact(world)[1].ravel())
    assert result.errors < bench.NOISE and result.bias < 2.5 * result.noise
    if not world.faults:
        assert result.scale == pytest.approx(1, abs=0.1)


# ---- continuations are not episodes --------------------------------------------------------------


def test_metrics_filters_and_pages_ignore_continuations():
    """Continuations with arbitrary returns do not change any metric of episodes."""
    plain = toy.random_rollout(4, turns=3)
    rollout = toy.forked(plain, (2, 1), rewards=np.full((8, 2, 3), 1e6), faulty=[(0, 0)])
    before = metrics.rollout_metrics(plain, 4) | Forks().metrics(plain)
    after = metrics.rollout_metrics(rollout, 4) | Forks().metrics(rollout)
    assert {name: float(after[name]) for name in before} == {n: float(x) for n, x in before.items()}
    assert set(after) - set(before) == {'fork/played', 'fork/tokens'} <= set(metrics.METRICS)
    count = int((np.asarray(rollout.extra['continuations'].turn) > 0).sum())
    assert float(after['fork/played']) == pytest.approx(count / 8)
    for rule in ('all', 'varied'):
        keep_rows = functools.partial(Filter(rule).keep_rows, groups=2, group_size=4)
        jax.tree.map(np.testing.assert_array_equal, keep_rows(rollout), keep_rows(plain))
    tokenizer = type('Bytes', (), {'token_bytes': lambda self: [b'a'] * toy.VOCAB})()
    tokenizer.eos_ids = ()
    pages = [
        document.of_rollout(jax.device_get(out), tokenizer, 'toy', ['left'], group_size=4)
        for out in (rollout, plain)
    ]
    assert pages[0] == pages[1]


# ---- optimiser steps -----------------------------------------------------------------------------


def test_an_episode_has_continuations_of_its_later_turns():
    # three turns: two after the first, two continuations each
    assert (Vine().continuations(3), Vine().rows_per_episode(3)) == (4, 5)
    assert (TurnGRPO().continuations(3), TurnGRPO().rows_per_episode(3)) == (0, 1)
