"""CAST: turns by what they gained or lost of what the best player could still earn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny
import toy_rollouts as toy

from agentrl_jax.algorithms.cast import CAST
from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.envs.frozen_lake.solver import lake_values
from agentrl_jax.rl import turn_credit

REWARDS = jnp.array([[0.0, 1, 5], [0.5, 0, 0], [1, 1, 1]])
VALUES = jnp.array([[0.6, 0.75, 9], [0.5, 9, 9], [0.5, 0.5, 0.5]])
PLAYED, HEALTHY = jnp.array([2, 1, 3]), jnp.array([True, True, False])


def test_gains_by_hand():
    """What comes after the end, or in an episode with a fault, is not seen."""
    # row 0: 0 + .75 - .6 = .15, 1 + 0 - .75 = .25; row 1: .5 + 0 - .5 = 0
    given = REWARDS, VALUES, PLAYED, HEALTHY
    gains = [[0.15, 0.25, 0], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_allclose(turn_credit.against_best(*given, lam=0.0), gains, atol=1e-6)
    half = [[0.275, 0.25, 0], [0, 0, 0], [0, 0, 0]]  # .15 + .25 / 2
    np.testing.assert_allclose(turn_credit.against_best(*given, lam=0.5), half, atol=1e-6)


def test_with_lam_1_they_are_returns_to_go_less_the_value():
    rollout = toy.random_rollout(0, turns=3, faulty=(2,))
    given = rollout.rewards, rollout.optimal_values, rollout.num_turns, rollout.healthy
    got = np.asarray(turn_credit.against_best(*given, lam=1.0))
    rewards, values, played, healthy = map(np.asarray, given)
    for b, k in np.ndindex(got.shape):
        there = healthy[b] and k < played[b]
        expected = rewards[b, k : played[b]].sum() - values[b, k] if there else 0.0
        assert got[b, k] == pytest.approx(expected, abs=1e-6)


def test_the_batch_by_hand():
    """Two turns of one and two tokens and one of one: rms over the four tokens."""
    layouts = [[(1, 1), (1, 2)], [(2, 1)]]
    rollout = toy.rollout_of(
        layouts, [[0.0, 1.0], [0.0, 0.0]], length=6, penalties=[[-0.1, 0], [0, 0]]
    ).replace(optimal_values=jnp.array([[0.5, 1.0], [0.5, 7.0]]))
    scores = toy.scores_of(rollout)
    # gains: -.1 + 1 - .5 = .4, 1 - 1 = 0 twice, 0 - .5 = -.5; rms = sqrt(.41 / 4)
    gains = np.array([[0, 0.4, 0, 0, 0, 0], [0, 0, -0.5, 0, 0, 0]])
    alone = CAST(turn_coef=2.0, outcome_coef=0.0, scale='none')
    batch = alone.make_batch(rollout, scores, group_size=2)
    np.testing.assert_allclose(batch.advantages, 2 * gains, atol=1e-6)
    # returns .9 and 0, std .9 / sqrt 2: +- 1 / sqrt 2
    outcome = np.where(rollout.action_mask, np.array([[1], [-1]]) / np.sqrt(2), 0)
    batch = CAST().make_batch(rollout, scores, group_size=2)
    expected = outcome + 0.1 * gains / np.sqrt(0.41 / 4)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-4, atol=1e-6)


def test_without_the_solver_it_is_grpo():
    rollout = toy.random_rollout(1, faulty=(3,))
    scores = toy.scores_of(rollout)
    plain = GRPO().make_batch(rollout, scores, group_size=4)
    batch = CAST(turn_coef=0.0).make_batch(rollout, scores, group_size=4)
    jax.tree.map(np.testing.assert_array_equal, batch, plain)


def test_a_rollout_has_the_values_of_its_turns_and_is_otherwise_the_same():
    """Those of the state that each turn began in, with the actions and turns that were left."""
    whole, _ = tiny.played('frozen_lake')
    params = tiny.cloned('frozen_lake')[0]
    out, _ = tiny.play('frozen_lake', params, tiny.KEY, valued=True, temperature=1.0)
    for name in set(out.__dataclass_fields__) - {'optimal_values'}:
        jax.tree.map(np.testing.assert_array_equal, getattr(out, name), getattr(whole, name))
    task, ends, seen = tiny.task('frozen_lake'), 0, []
    for b in range(16):
        states, turns = tiny.replay(out, b, task, tiny.KEY, b)
        used = 0
        for k, turn in enumerate(turns):
            left = min(5 - used, (3 - k) * 3)
            values, _ = lake_values(np.asarray(states[k].board)[None], 2 / 3, left)
            expected = values[left, 0, int(states[k].position)]
            assert out.optimal_values[b, k] == pytest.approx(expected, abs=1e-6)
            seen.append(float(expected))
            used += len(turn['actions'])
        ends += len(turns) < 3
        assert not out.optimal_values[b, len(turns) :].any()
    assert ends and len(set(np.round(seen, 4))) > 5
    assert whole.optimal_values is None
