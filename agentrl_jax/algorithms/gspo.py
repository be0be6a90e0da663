"""GSPO: GRPO with one importance ratio per sequence, or per turn (arXiv:2507.18071).

  s = exp(mean over the sequence's trained tokens of log pi - log pi_old)
  loss_t = clipped surrogate of the ratio sg(s) pi / sg(pi), which has the value of s
The clip ranges, 3e-4 and 4e-4, are far smaller than PPO's. All episodes have the same weight
(seq_mean_token_mean). gspo_turn takes the mean over the turn of a token instead.

A sequence is the text after one prompt: the episode, if the policy reads the full conversation.
With context.window > 0 every turn has a separate prompt. The sequence is then the turn, as in
gspo_turn, and gspo is rejected. Ratios are per row, but weights are not: all rows of an episode are
one sequence in every aggregation (losses.token_weights).
"""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import KL, Clip
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class GSPO(GRPO):
    clip: Clip = Clip(3e-4, 4e-4)
    kl: KL = KL()

    WHOLE_EPISODES = True

    def segment(self, batch: Batch) -> jax.Array:
        """Return the segment of each token; tokens of a segment share a ratio; int32 [B, T]."""
        return jnp.zeros_like(batch.turn)

    def log_ratios(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """Return the mean log-ratio over each token's segment, 0 off the mask; [B, T]."""
        segment = self.segment(batch)
        log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
        return segment_mean(log_ratio, segment, batch.mask)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        mean = self.log_ratios(logprobs, batch)
        current = jnp.where(batch.mask, logprobs, 0.0)
        # The value of the mean with the gradient of the token's log pi
        log_ratios = jax.lax.stop_gradient(mean - current) + current
        log_ratios = jnp.where(batch.mask, log_ratios, 0.0)
        return losses.clipped_surrogate(
            log_ratios, batch.advantages, batch.mask, **self.clip.keywords
        )


def segment_mean(x: jax.Array, segment: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x over the masked tokens of a token's segment (an int in [0, T)); all [B, T]."""
    sums, counts = (adv.per_turn(y, segment, mask, turns=x.shape[1]) for y in (x, jnp.ones_like(x)))
    return adv.to_tokens(sums / jnp.maximum(counts, 1), segment, mask)
