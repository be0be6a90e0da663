"""Advantages and losses compared with verl's functions on the same inputs.

`make test-reference` installs verl (requirements/reference.txt) and runs this file; without verl
it is skipped. Tests describe known differences and compare the rest.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.algorithms.cispo import CISPO
from agentrl_jax.algorithms.dapo import DAPO
from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.algorithms.gspo import GSPO
from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.algorithms.reinforce_pp import ReinforcePP
from agentrl_jax.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from agentrl_jax.algorithms.rloo import RLOO
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import KL, Clip, Range
from agentrl_jax.rl.recursions import token_rewards

with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    core = pytest.importorskip('verl.trainer.ppo.core_algos', reason='make test-reference runs it')
import torch  # noqa: E402 (a dependency of verl)
from verl.workers.config import ActorConfig  # noqa: E402

ROWS, GROUP = 8, 4
SEEDS = range(5)
AGGREGATIONS = {
    'token_mean': 'token-mean',
    'seq_mean_token_mean': 'seq-mean-token-mean',
    'seq_mean_token_sum': 'seq-mean-token-sum',
}


def tensor(x):
    return torch.tensor(np.asarray(x), dtype=torch.float64)


@functools.cache
def rollout_of(seed, gaps=True):
    """Return random episodes of up to three turns; without gaps: one observation, one answer."""
    return toy.random_rollout(seed, rows=ROWS, turns=3 if gaps else 1, length=20)


def batch_of(how, seed, gaps=True):
    """Return the rollout, its scores, and its batch without a KL."""
    rollout = rollout_of(seed, gaps)
    scores = toy.scores_of(rollout, seed)
    how = dataclasses.replace(how, kl=KL(0.0))
    return rollout, scores, how.make_batch(rollout, scores, group_size=GROUP)


def episode_rewards(rollout):
    """Return [B, T] with the full return on the last action token, as in verl's reward managers."""
    return tensor(token_rewards(rollout, rollout.action_mask, reward_on='episode'))


def same(ours, theirs, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=tolerance, rtol=tolerance)


OUTCOME = {
    GRPO: core.compute_grpo_outcome_advantage,
    RLOO: core.compute_rloo_outcome_advantage,
    ReinforcePPBaseline: core.compute_reinforce_plus_plus_baseline_outcome_advantage,
}


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('cls', OUTCOME)
def test_group_advantages(cls, seed):
    rollout, _, batch = batch_of(cls(), seed)
    index = np.repeat(np.arange(ROWS // GROUP), GROUP)
    theirs, _ = OUTCOME[cls](
        token_level_rewards=episode_rewards(rollout),
        response_mask=tensor(rollout.action_mask),
        index=index,
    )
    same(batch.advantages, theirs)


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('gaps', [True, False])
def test_gae_steps_over_observations(seed, gaps):
    rollout, scores, batch = batch_of(PPO(gamma=0.97, lam=0.9), seed, gaps)
    rewards = token_rewards(rollout, rollout.action_mask, reward_on='turn')
    theirs, returns = core.compute_gae_advantage_return(
        tensor(rewards), tensor(scores.values), tensor(rollout.action_mask), 0.97, 0.9
    )
    mask = np.asarray(rollout.action_mask)
    same(batch.advantages, theirs * tensor(mask), 5e-5)
    same(np.where(mask, batch.returns, 0), np.where(mask, returns, 0))


@pytest.mark.parametrize('seed', SEEDS)
def test_reinforce_plus_plus_over_one_turn(seed):
    """Several turns are not compared: verl resets the running return at every observation."""
    rollout, _, batch = batch_of(ReinforcePP(gamma=0.95, reward_on='episode'), seed, False)
    rewards = episode_rewards(rollout)
    theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=tensor(rollout.action_mask),
        config=type('Config', (), {'gamma': 0.95}),
    )
    same(batch.advantages, theirs * tensor(rollout.action_mask), 5e-5)


def actor(**settings):
    return ActorConfig(
        strategy='fsdp',
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=False,
        clip_ratio=0.2,
        **settings,
    )


def moved_logprobs(rollout, seed):
    rng = np.random.default_rng(seed + 100)
    new = np.asarray(rollout.logprobs) + 0.4 * rng.normal(size=rollout.logprobs.shape)
    return np.where(rollout.action_mask, new, 0.0).astype(np.float32)


LOSSES = {
    'ppo, dual clip': (GRPO(clip=Clip(dual=3.0)), core.compute_policy_loss_vanilla),
    'clip-higher': (
        DAPO(max_length=0, clip=Clip(high=0.28, dual=10.0)),
        core.compute_policy_loss_vanilla,
    ),
    'gspo': (GSPO(clip=Clip(high=0.3)), core.compute_policy_loss_gspo),
    'cispo': (CISPO(clip=Range(high=0.3)), core.compute_policy_loss_cispo),
}


@pytest.mark.parametrize('seed', SEEDS[:3])
@pytest.mark.parametrize('aggregation', AGGREGATIONS)
@pytest.mark.parametrize('case', LOSSES)
def test_policy_losses_and_their_gradients(case, aggregation, seed):
    how, theirs_fn = LOSSES[case]
    _, _, batch = batch_of(how, seed)
    new = moved_logprobs(rollout_of(seed), seed)
    weights = losses.token_weights(batch.mask, aggregation=aggregation)

    def ours(logprobs):
        return losses.weighted_sum(weights, how.loss(logprobs, batch))

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(new))
    logprobs = tensor(new).requires_grad_()
    config = actor(
        clip_ratio_low=how.clip.low,
        clip_ratio_high=how.clip.high,
        clip_ratio_c=getattr(how.clip, 'dual', 0.0) or 3.0,
    )
    loss, _ = theirs_fn(
        old_log_prob=tensor(batch.old_logprobs),
        log_prob=logprobs,
        advantages=tensor(batch.advantages),
        response_mask=tensor(batch.mask),
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=config,
    )
    loss.backward()
    same(value, loss.detach())
    same(gradient, logprobs.grad)


@pytest.mark.parametrize('estimator', ['k1', 'k2', 'k3', 'k1+', 'k3+'])
def test_kl_estimators_and_their_gradients(estimator):
    rollout = rollout_of(0)
    new, mask = moved_logprobs(rollout, 0), rollout.action_mask
    reference = toy.scores_of(rollout).ref_logprobs

    def ours(logprobs):
        return losses.kl_penalty(logprobs, reference, mask, estimator=estimator).sum()

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(new))
    logprobs = tensor(new).requires_grad_()
    total = (core.kl_penalty(logprobs, tensor(reference), estimator) * tensor(mask)).sum()
    total.backward()
    same(value, total.detach())
    same(gradient, logprobs.grad)


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_the_clipped_value_loss(aggregation):
    _, _, batch = batch_of(PPO(), 1)
    values = np.asarray(batch.old_values) + 0.8 * np.random.default_rng(5).normal(
        size=batch.old_values.shape
    )
    weights = losses.token_weights(batch.mask, aggregation=aggregation)
    ours = losses.weighted_sum(
        weights,
        losses.clipped_value_loss(
            jnp.asarray(values, jnp.float32),
            batch.old_values,
            batch.returns,
            batch.mask,
            clip_value=0.5,
        ),
    )
    theirs, _ = core.compute_value_loss(
        tensor(values),
        tensor(batch.returns),
        tensor(batch.old_values),
        tensor(batch.mask),
        cliprange_value=0.5,
        loss_agg_mode=AGGREGATIONS[aggregation],
    )
    same(ours, theirs)
