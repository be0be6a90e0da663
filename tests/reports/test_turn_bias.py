"""Turn credit against exact gradients: turn_grpo has no stopping bias, unlike MT-GRPO.

10^5 groups of four play worlds small enough for dynamic programming (exact_gradients.py).
"""

import dataclasses
import functools

import exact_gradients as bench
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms.rloo import RLOO
from agentrl_jax.algorithms.turn_grpo import TurnGRPO
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import KL

pytestmark = pytest.mark.soak

GROUPS, MEMBERS = 100_000, 4


@functools.cache
def sample(name):
    return bench.play(bench.WORLDS[name], GROUPS * MEMBERS, np.random.default_rng(0))


def quality(name, estimator, scale=None):
    world = bench.WORLDS[name]
    advantages = bench.ESTIMATORS[estimator](sample(name), world, MEMBERS)
    gradients = bench.group_gradients(sample(name), advantages, world, MEMBERS)
    return bench.quality(gradients, bench.exact(world)[1].ravel(), scale)


# ---- the yardstick -------------------------------------------------------------------------------


@pytest.mark.parametrize('name', bench.WORLDS)
def test_the_exact_gradient_matches_finite_differences(name):
    world = bench.WORLDS[name]
    _, gradient = bench.exact(world)
    for index in np.ndindex(world.logits.shape):
        step = np.zeros_like(world.logits)
        step[index] = 1e-5
        up, down = (
            bench.exact(dataclasses.replace(world, logits=world.logits + sign * step))[0][0, 0]
            for sign in (1, -1)
        )
        assert gradient[index] == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_group_gradients_by_hand():
    # one group of two in the world of two turns: row 0 stops (A = 1), row 1 continues (2, then 3).
    # p = 1/2: score of the chosen action +-1/2, mean over two members
    world = bench.WORLDS['gain']
    one = bench.Played(
        states=np.array([[0, 0], [0, 1]]),
        actions=np.array([[0, 0], [1, 0]]),
        rewards=jnp.zeros((2, 2)),
        outcome=jnp.zeros(2),
        num_turns=jnp.array([1, 2]),
        healthy=jnp.ones(2, bool),
    )
    out = bench.group_gradients(one, np.array([[1.0, 9], [2, 3]]), world, 2).reshape(2, 2, 2)
    np.testing.assert_allclose(out[0, 0], [0.25 - 0.5, -0.25 + 0.5])
    np.testing.assert_allclose(out[1, 1], [0.75, -0.75])
    assert not out[0, 1].any() and not out[1, 0].any()


# ---- bias ----------------------------------------------------------------------------------------


@pytest.mark.slow('averages over 100,000 groups')
@pytest.mark.parametrize('name', ['lookups', 'faults'])
def test_turn_grpo_has_no_bias_in_any_world(name):
    """Not even in length: without faults the best scale is 1."""
    scale = None if bench.WORLDS[name].faults else 1.0
    result = quality(name, 'turn_grpo', scale)
    assert result.errors < bench.NOISE and result.bias < 2.5 * result.noise
    assert quality(name, 'turn_grpo').scale == pytest.approx(1, abs=0.05) or scale is None


@pytest.mark.slow('averages over 100,000 groups')
@pytest.mark.parametrize('mode', ['mt_v1', 'mt_cumulative'])
def test_comparing_only_episodes_that_reached_a_turn_is_biased(mode):
    result = quality('lookups', f'{mode}, mean')
    assert result.errors > 2 * bench.NOISE and result.bias > 0.05 > 2.5 * result.noise


@pytest.mark.parametrize('name', ['gain', 'cost'])
def test_only_turn_grpo_credits_the_value_of_a_second_turn_to_the_decision_to_take_it(name):
    """Half a group stops, half continues to +-1: MT-GRPO's first advantage is 0 for both."""
    cumulative = bench.ESTIMATORS['mt_cumulative, mean'](sample(name), bench.WORLDS[name], MEMBERS)
    assert not np.asarray(cumulative[:, 0]).any()
    credit = np.asarray(bench.ESTIMATORS['turn_grpo'](sample(name), bench.WORLDS[name], MEMBERS))
    continued = sample(name).actions[:, 0] == bench.GO
    sign = 1 if name == 'gain' else -1
    assert sign * credit[continued, 0].mean() > 0.4 > -0.4 > sign * credit[~continued, 0].mean()


@pytest.mark.parametrize('name, low, high', [('bonuses', 0.5, 0.8), ('lookups', 1.0, 1.3)])
def test_turn_credit_saves_variance_for_turn_rewards_and_costs_some_for_final_rewards(
    name, low, high
):
    """Compared with one advantage per episode. Stopped members count as 0 despite their rewards."""
    by_turn, by_episode = quality(name, 'turn_grpo'), quality(name, 'rloo')
    assert by_episode.errors < bench.NOISE and low < by_turn.variance / by_episode.variance < high


# ---- the algorithm -------------------------------------------------------------------------------


def test_returns_to_go_against_the_others_by_hand():
    # rewards 1 2 | 3 (stopped) | -1 4; to go 3 2 | 3 0 | 3 4; others 3, 3, 3 and 2, 3, 1
    rewards = jnp.array([[1.0, 2], [3, 0], [-1, 4]])
    turns, healthy = jnp.array([2, 1, 2]), jnp.ones(3, bool)
    credit = functools.partial(turn_credit.leave_one_out_to_go, rewards, group_size=3)
    np.testing.assert_allclose(credit(turns, healthy), [[0, 0], [0, 0], [0, 3]], atol=1e-6)
    # a faulty member is not in the means: others 3 and 3, 4 and 2
    out = credit(turns, jnp.array([True, False, True]))
    np.testing.assert_allclose(out, [[0, -2], [0, 0], [0, 2]], atol=1e-6)
    # rewards after the last turn are ignored
    out = credit(jnp.array([1, 1, 1]), healthy)  # 1 3 -1: others 1, 0, 2
    np.testing.assert_allclose(out, [[0, 0], [3, 0], [-3, 0]], atol=1e-6)


def test_with_one_turn_it_equals_rloo_and_the_batch_has_one_scale():
    rollout = toy.random_rollout(0, turns=1)
    plain, want, scaled = (
        toy.batch_of(algorithm, rollout, 4, toy.scores_of(rollout))
        for algorithm in (TurnGRPO(scale='none'), RLOO(kl=KL()), TurnGRPO())
    )
    np.testing.assert_allclose(plain.advantages, want.advantages, atol=1e-6)
    size = np.sqrt((np.asarray(plain.advantages)[np.asarray(plain.mask)] ** 2).mean())
    np.testing.assert_allclose(scaled.advantages, plain.advantages / size, rtol=1e-5)


def test_the_kl_of_a_turn_counts_in_the_returns_of_it_and_earlier_turns():
    # two members of two turns, no rewards; KL of 1 on row 0's second turn: to go -1 -1 | 0 0
    rollout = toy.rollout_of([[(1, 1), (1, 1)]] * 2, [[0.0, 0]] * 2, length=4)
    scores = toy.scores_of(rollout)
    scores = scores.replace(
        old_logprobs=jnp.array([[0.0, 0, 0, 2], [0, 0, 0, 0]]), ref_logprobs=jnp.zeros((2, 4))
    )
    algorithm = TurnGRPO(scale='none', kl=KL(0.5, 'reward'))
    batch = toy.batch_of(algorithm, rollout, 2, scores)
    np.testing.assert_allclose(batch.advantages, [[0, -1, 0, -1], [0, 1, 0, 1]])
