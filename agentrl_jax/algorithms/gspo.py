"""GSPO: GRPO with one importance ratio per sequence, or per turn (arXiv:2507.18071).

  s = exp(mean over the sequence's trained tokens of log pi - log pi_old)
  loss_t = clipped surrogate of the ratio sg(s) pi / sg(pi), which has the value of s
Clip ranges are far smaller than PPO's, 3e-4 and 4e-4; rows weigh the same (seq_mean_token_mean).
gspo_turn takes the mean over the turn of a token instead.

A sequence is what one prompt conditions: the episode, where the policy sees the whole conversation.
Where it sees only the last turns (context.window > 0) that is the turn, each with a prompt of its
own, and its ratio is that of gspo_turn; gspo, whose ratio would be of rows with other prompts, is
refused there. The ratio is the row's own, but what a row weighs is not: the rows of an episode are
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
        """What shares a ratio: the tokens of a row with the same number; int32 [B, T]."""
        return jnp.zeros_like(batch.turn)

    def log_ratios(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """Mean log-ratio over the segment of a token, 0 off the mask; [B, T]."""
        segment = self.segment(batch)
        log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
        return segment_mean(log_ratio, segment, batch.mask)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        mean = self.log_ratios(logprobs, batch)
        current = jnp.where(batch.mask, logprobs, 0.0)
        # The value of the mean, the gradient of the token's own log pi
        own = jax.lax.stop_gradient(mean - current) + current
        own = jnp.where(batch.mask, own, 0.0)
        return losses.clipped_surrogate(own, batch.advantages, batch.mask, **self.clip.keywords)


def segment_mean(x: jax.Array, segment: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x over the masked tokens of a token's segment (an int in [0, T)); all [B, T]."""
    sums, counts = (adv.per_turn(y, segment, mask, turns=x.shape[1]) for y in (x, jnp.ones_like(x)))
    return adv.to_tokens(sums / jnp.maximum(counts, 1), segment, mask)
