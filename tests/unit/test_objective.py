"""The loss of a policy with entropy and KL, and the metrics of ratios, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses, metrics, update
from agentrl_jax.rl.algorithm import KL, Clip
from agentrl_jax.rl.learning import UpdateSettings

CLIP = Clip(0.2, 0.28)


@pytest.mark.parametrize('where', ['loss', 'reward'])
def test_policy_loss_adds_entropy_and_kl_by_hand(where):
    """A model without layers: hidden is 1, logits [0, ln 3], so p = (1/4, 3/4) everywhere.

    A KL term in the reward also has a reference, but its KL was not measured.
    """
    rollout = toy.rollout_of([[(1, 2)]], [[1.0]], length=3)
    rollout = rollout.replace(tokens=jnp.array([[0, 0, 1]]))
    batch = toy.batch_of(GRPO(), rollout, 1)  # A = 1 (group of one)
    logp = np.log([0.25, 0.75])
    batch = batch.replace(
        old_logprobs=jnp.array([[0.0, *logp]], jnp.float32),
        ref_logprobs=jnp.array([[0.0, *(logp - 0.5)]], jnp.float32),
    )
    how = GRPO(clip=CLIP, entropy_coef=0.1, kl=KL(0.2, where, 'k1'))
    loss, sums = update.policy_loss(
        {},
        batch,
        losses.token_weights(batch.mask, 'token_mean'),
        None,
        ModelFns(
            lambda *_: jnp.ones((1, 3, 1)), lambda _: jnp.log(jnp.array([[1.0, 3]])), None, None
        ),
        UpdateSettings(algorithm=how, has_reference=True),
    )
    entropy = -(np.exp(logp) * logp).sum()
    # ratio 1: -1 per token; entropy the same for both; k1 = .5, k3 = e^-.5 + .5 - 1
    in_loss = where == 'loss'
    np.testing.assert_allclose(loss, -1 - 0.1 * entropy + 0.2 * 0.5 * in_loss, rtol=1e-5)
    np.testing.assert_allclose(sums['policy/entropy'], 2 * entropy, rtol=1e-5)
    measured = 1.0 if in_loss else 2 * (np.exp(-0.5) - 0.5)
    np.testing.assert_allclose(sums['policy/kl_ref'], measured, rtol=1e-5)
    assert sums['policy/clip_frac_low'] == sums['policy/clip_frac_high'] == 0


def test_ratio_metrics_by_hand():
    # ratios 2 (A > 0: clipped high), .5 (A < 0: clipped low), 4 (A < 0: only a dual clip), 1
    batch = toy.batch_of(GRPO(), toy.rollout_of([[(1, 4)]], [[1.0]], length=5), 1)
    batch = batch.replace(advantages=jnp.array([[0.0, 1, -1, -1, 1]]))
    logprobs = jnp.log(jnp.array([[9.0, 2, 0.5, 4, 1]]))
    sums = metrics.ratio_sums(logprobs, batch)
    assert sums['policy/ratio_max'] == pytest.approx(4.0)
    np.testing.assert_allclose(sums['policy/kl_old'], -np.log(4), rtol=1e-5)  # of 2 .5 4 1
    # r - 1 - ln r: 1 - ln 2, -1/2 + ln 2, 3 - ln 4, 0
    np.testing.assert_allclose(sums['policy/kl_old_k3'], 3.5 - np.log(4), rtol=1e-4)
    clipped = GRPO(clip=Clip(0.2, 0.28, 3.0)).clipped(logprobs, batch)
    assert {name: np.flatnonzero(tokens).tolist() for name, tokens in clipped.items()} == {
        'policy/clip_frac_high': [1],
        'policy/clip_frac_low': [2],
        'policy/clip_frac_dual': [3],
    }
    assert 'policy/clip_frac_dual' not in GRPO(clip=CLIP).clipped(logprobs, batch)
