"""SAO: the loss and the advantages by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import toy_rollouts as toy

from agentrl_jax.extras.sao.sao import SAO, adaptive_lambda


def test_sao_drops_tokens_on_both_sides_for_any_advantage_by_hand():
    # ratios 1.5, .65, 6.5: the last two are beyond .7 and 6
    rollout, how = toy.rollout_of([[(1, 2), (1, 1)]], [[1.0, 1.0]], length=6), SAO()
    batch = toy.batch_of(how, rollout, 1, toy.scores_of(rollout))
    batch = batch.replace(
        advantages=jnp.array([[0, 2.0, -1, 0, 1, 0]]), old_logprobs=jnp.zeros((1, 6))
    )
    logp = jnp.log(jnp.array([[1.0, 1.5, 0.65, 1, 6.5, 1]]))
    np.testing.assert_allclose(how.loss(logp, batch), [[0, -3.0, 0, 0, 0, 0]], rtol=1e-6)
    gradient = jax.grad(lambda x: how.loss(x, batch).sum())(logp)
    # the gradient of the paper's sg(f(r)) A log pi: -1.5 x 2
    np.testing.assert_allclose(gradient, [[0, -3.0, 0, 0, 0, 0]], rtol=1e-6)
    clipped = how.clipped(logp, batch)
    assert np.flatnonzero(clipped['policy/clip_frac_high']).tolist() == [4]
    assert np.flatnonzero(clipped['policy/clip_frac_low']).tolist() == [2]


def test_sao_skips_observations_with_a_length_dependent_lambda_by_hand():
    """Turns (1 obs, 2 act), (2 obs, 1 act) with rewards .5 and 1: action tokens at 1, 2 and 5."""
    layouts, rewards = [[(1, 2), (2, 1)], [(1, 2)]], [[0.5, 1.0], [-1.0, 0.0]]
    rollout = toy.rollout_of(layouts, rewards, length=7)
    values = jnp.zeros((2, 7)).at[0, jnp.array([1, 2, 5])].set(jnp.array([0.2, 0.4, 0.6]))
    scores = toy.scores_of(rollout).replace(values=values)
    batch = toy.batch_of(SAO(lam_alpha=1.0), rollout, 1, scores)
    # 3 tokens: lambda 2/3. delta_5 = 1 - .6, delta_2 = .5 + .6 - .4, delta_1 = .4 - .2
    last, middle = 0.4, 0.7 + 2 / 3 * 0.4
    want = [0, 0.2 + 2 / 3 * middle, middle, 0, 0, last, 0]
    np.testing.assert_allclose(batch.advantages[0], want, rtol=1e-5)
    np.testing.assert_allclose(batch.returns[0], [0, 1.5, 1.5, 0, 0, 1.0, 0], rtol=1e-5)
    # row 1 has 2 tokens and no values: lambda 1/2, return -1
    np.testing.assert_allclose(batch.advantages[1, 1:3], [-0.5, -1.0], rtol=1e-5)
    np.testing.assert_allclose(adaptive_lambda(jnp.array([[0], [1], [10]]), 0.5), [[0], [0], [0.8]])
