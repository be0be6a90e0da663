"""Score centering: the mean weighted score over what could be said is taken off, by full sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms.cispo import CISPO
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses, objective
from agentrl_jax.rl.algorithm import Range
from agentrl_jax.rl.learning import Learning
from agentrl_jax.types import Batch

V = toy.VOCAB
ONE = ModelFns(lambda params, tokens, *_: jnp.ones((*tokens.shape, 1)), lambda params: params[None])
NEW, OLD = (jnp.asarray(np.random.default_rng(s).normal(size=V), jnp.float32) for s in (5, 6))
CLIP = Range(0.6, 0.5)


def slope(p, q, low, high):
    """In the logits of p."""
    old = [jnp.log(jnp.array(q))]

    def value(z):
        return losses.mean_score(jax.nn.log_softmax(z), old, low=low, high=high)

    return jax.grad(value)(jnp.log(jnp.array(p)))


def test_the_mean_score_by_hand():
    p, q = [0.6, 0.4], [0.5, 0.5]
    # unweighted, w = 1: q - p. With the whole ratio it is that of p, exactly 0
    np.testing.assert_allclose(slope(p, q, 1, 1), [-0.1, 0.1], atol=1e-6)
    np.testing.assert_allclose(slope(p, q, 0, 9), 0, atol=1e-7)
    # ratios 1.2 and .8, the first cut to 1.1: .55 and .4, less p times their sum .95
    np.testing.assert_allclose(slope(p, q, 0, 1.1), [-0.02, 0.02], atol=1e-6)
    assert not slope(p, p, 0, 1.1).any()  # no rounding of which Adam would make steps


def gradients(how, new, advantages):
    """Of the loss of each of the V tokens that could be sampled, in the logits; [V, V]."""
    tokens = jnp.stack([jnp.zeros(V, jnp.int32), jnp.arange(V)], axis=1)
    mask = jnp.zeros((V, 2), bool).at[:, 1].set(True)
    old = jnp.where(mask, jax.nn.log_softmax(OLD)[:, None], 0.0)
    zeros = jnp.zeros((V, 2))
    batch = Batch(
        tokens=tokens,
        attention_mask=jnp.ones((V, 2), bool),
        mask=mask,
        value_mask=~mask & mask,
        turn=jnp.zeros((V, 2), jnp.int32),
        old_logprobs=old,
        ref_logprobs=zeros,
        advantages=mask * jnp.asarray(advantages, jnp.float32)[:, None],
        returns=zeros,
        old_values=zeros,
    )
    fns = ONE.replace(teachers=((ONE, OLD),)) if how.centered else ONE
    given = (jnp.float32(0), fns, Learning(algorithm=how))

    def loss(z, row):
        weights = mask * (jnp.arange(V) == row)[:, None].astype(jnp.float32)
        return objective.policy_loss(z, batch, weights, *given)[0]

    return jax.vmap(jax.grad(loss), (None, 0))(new, jnp.arange(V))


def test_the_loss_has_the_gradient_of_the_whole_softmax():
    """-A (w_y s_y - sum_v q_v w_v s_v), s_v = e_v - p, token by token; its mean over q is 0."""
    advantages = np.random.default_rng(0).normal(size=V)
    p, q = (np.asarray(jax.nn.softmax(z), np.float64) for z in (NEW, OLD))
    w = np.clip(p / q, 0.4, 1.5)
    assert (p / q > 1.5).any() and (p / q < 0.4).any()
    score = np.eye(V) - p
    mean = sum(q[v] * w[v] * score[v] for v in range(V))
    expected = [-advantages[y] * (w[y] * score[y] - mean) for y in range(V)]
    centered = CISPO(clip=CLIP, centered=True)
    np.testing.assert_allclose(gradients(centered, NEW, advantages), expected, atol=1e-6)
    alike = np.asarray(gradients(centered, NEW, np.ones(V)))
    np.testing.assert_allclose(q @ alike, 0, atol=1e-6)
    drift = q @ np.asarray(gradients(CISPO(clip=CLIP), NEW, np.ones(V)))
    np.testing.assert_allclose(drift, -mean, atol=1e-6)
    assert np.abs(mean).max() > 0.02


def test_before_the_first_step_nothing_is_taken_off():
    advantages = np.random.default_rng(1).normal(size=V)
    plain, centered = (gradients(CISPO(centered=on), OLD, advantages) for on in (False, True))
    np.testing.assert_allclose(plain, centered, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('centered', [False, True])
def test_bounds_are_those_of_the_weight(centered):
    bounds = CISPO(clip=CLIP, centered=centered).score_bounds
    assert bounds == ((0.4, 1.5) if centered else None)
