"""Entropy control: PPO with one of four remedies against a fall of entropy.

  top       loss_t = 0 except for the `share` of the tokens of a row with the largest entropy
            (arXiv:2506.01939; TRL: top_entropy_quantile, .2)
  clip_cov  loss_t = 0 for a random `share` of the trained tokens, drawn from those with 1 < c_t < 5
            (arXiv:2505.22617; verl: compute_policy_loss_clip_cov, share 2e-4)
  kl_cov    loss_t + |log pi - log pi_old| for the `share` of the trained tokens with the largest
            c_t (arXiv:2505.22617; verl: compute_policy_loss_kl_cov, share 2e-4, weight 1)
  target    an entropy bonus only in updates with m < target (arXiv:2505.22312; TRL: entropy_target)
c_t = (A_t - mean A) (log pi_old - mean log pi_old) and m = mean of -log pi_old, over the trained
tokens of a rollout; in expectation m is their mean entropy. At least one token is selected.
Denominators stay.

Differences from the sources: c_t and m are of a rollout and pi_old, there of a micro-batch (m: of
the previous update) and pi. kl_cov keeps the clip; loss.clip_low=1 and a large loss.clip_high
remove it as there. top compares entropies in a row (an episode, or with windows a turn), there in a
batch. The bonus has a constant coefficient, there one that moves by .005 in each update.

Bias: the mean of c_t is proportional to the fall of entropy in a small step of a tabular policy, so
clip_cov omits and kl_cov holds back probable tokens that did well and improbable ones that did
badly. That depends on the sampled token: baselines do not cancel, and the policy learns less from
what it does often. The gradient of |log pi - log pi_old| has size 1 from the first rounding on, so
kl_cov adds noise while pi is close to pi_old. top never unlearns a mistake of which the policy is
certain. The bonus of target moves the optimum towards random play while m is below the target.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import Extra
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.run.hooks import Addition, Extension, Setup
from agentrl_jax.settings.marks import POSITIVE, POSITIVE_FRACTION, ConfigName, OnlyIf
from agentrl_jax.settings.rules import Rule
from agentrl_jax.types import Batch

BOUNDS = (1.0, 5.0)  # of c_t in clip_cov; verl's
SELECTED, SATISFIED = 'entropy_selected', 'entropy_satisfied'


@dataclasses.dataclass(frozen=True)
class EntropyControl(PPO):
    method: Annotated[
        Literal['top', 'clip_cov', 'kl_cov', 'target'], ConfigName('entropy.method')
    ] = 'top'  # top: train uncertain tokens; clip_cov, kl_cov: drop tokens that lower the entropy,
    # or penalise their KL; target: an entropy bonus below a target
    share: Annotated[
        float,
        POSITIVE_FRACTION,
        ConfigName('entropy.share'),
        OnlyIf(lambda how: how.method != 'target', 'entropy.method=top, clip_cov or kl_cov'),
    ] = 0.2  # share of the trained tokens that is selected
    target: Annotated[
        float,
        POSITIVE,
        ConfigName('entropy.target'),
        OnlyIf(lambda how: how.method == 'target', 'entropy.method=target'),
    ] = 0.2  # entropy per token, in nats, above which there is no bonus

    RULES = (
        Rule({'entropy.method': {'top', 'clip_cov', 'kl_cov'}, 'loss.entropy_coef': POSITIVE}),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return PPO's batch. clip_cov sets advantages to 0, kl_cov marks tokens for `loss`."""
        batch = super().make_batch(rollout, scores, group_size=group_size, keep=keep)
        if self.method == 'clip_cov':
            dropped = self.selected(batch)
            return batch.replace(advantages=jnp.where(dropped, 0.0, batch.advantages))
        if self.method == 'kl_cov':
            return batch.replace(extra={SELECTED: self.selected(batch)})
        return batch

    def selected(self, batch: Batch) -> jax.Array:
        """Return the tokens that clip_cov or kl_cov selects; bool [B, T]."""
        rank, candidates = covariances(batch), batch.mask
        if self.method == 'clip_cov':
            candidates &= (rank > BOUNDS[0]) & (rank < BOUNDS[1])
            # A batch has no key; its tokens differ in each step and are the same in a resumed run
            key = jax.random.fold_in(jax.random.key(0), batch.tokens.sum())
            rank = jax.random.uniform(key, rank.shape)
        rows = (x.reshape(1, -1) for x in (rank, candidates))
        return largest(*rows, self.share, batch.mask.sum().reshape(1)).reshape(rank.shape)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        loss = super().loss(logprobs, batch)
        if self.method == 'kl_cov':
            kl = jnp.abs(self.log_ratios(logprobs, batch))
            loss += jnp.where(batch.extra[SELECTED], kl, 0.0)
        return loss


@dataclasses.dataclass(frozen=True)
class Controls(Extension):
    """Extension that adds the terms of top and target; the algorithm has the settings."""

    def load(self, setup: Setup, *, learns: bool) -> Addition:
        how = setup.config.algorithm
        by_entropy = isinstance(how, EntropyControl) and how.method in ('top', 'target')
        return Control(how) if learns and by_entropy else Addition()


@dataclasses.dataclass(frozen=True)
class Control(Addition):
    how: EntropyControl

    def extra(self, task):
        return EntropyTerm(self.how)


@dataclasses.dataclass(frozen=True)
class EntropyTerm(Extra):
    """Removes from PPO's loss the tokens that top omits, or the bonus above the target."""

    how: EntropyControl

    def arrays(self, rollout, mask, learner):
        if self.how.method != 'target':
            return {}
        satisfied = masked_mean(-rollout.logprobs, mask) >= self.how.target
        return {SATISFIED: jnp.broadcast_to(satisfied.astype(jnp.float32), len(mask))}

    def loss(self, forward, batch, weights, total, learner):
        fns, settings = learner.fns, learner.settings
        rows = forward.hidden, fns.head(forward.params), batch.tokens, settings.head
        masks = dict(mask=batch.mask, allowed=batch.allowed)
        logprobs, entropy = losses.token_logprobs(*rows, with_entropy=True, **masks)
        if self.how.method == 'target':
            per_token = self.how.entropy_coef * batch.extra[SATISFIED][:, None] * entropy
        else:
            rank = jax.lax.stop_gradient(entropy)
            uncertain = largest(rank, batch.mask, self.how.share, batch.mask.sum(1))
            per_token = jnp.where(uncertain, 0.0, -settings.algorithm.loss(logprobs, batch))
        return losses.weighted_sum(weights, per_token), {}


def covariances(batch: Batch) -> jax.Array:
    """c_t = (A_t - mean A) (log pi_old - mean log pi_old) over the trained tokens; [B, T]."""
    parts = batch.advantages, batch.old_logprobs
    centred = [jnp.where(batch.mask, x - masked_mean(x, batch.mask), 0.0) for x in parts]
    return centred[0] * centred[1]


def largest(x: jax.Array, mask: jax.Array, share: float, tokens: jax.Array) -> jax.Array:
    """Return the n largest masked values of each row, the first of equal ones; bool [N, M].

    x [N, M]; n = share * tokens int32 [N], rounded down, at least one.
    """
    count = jnp.maximum((share * tokens).astype(jnp.int32), 1)
    order = jnp.argsort(jnp.where(mask, x, -jnp.inf), axis=1, descending=True)
    return mask & (jnp.argsort(order, axis=1) < count[:, None])
