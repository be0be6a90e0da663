"""CISPO: clips the importance weight, never the gradient of a token (arXiv:2506.13585).

  loss_t = -sg(w) A log pi,  w = clip(rho, 1 - clip_low, 1 + clip_high),  A as in GRPO
There is no lower bound: clip_low = 1. The paper gives no upper bound; the maximum weight of 5 is
from arXiv:2510.13786. dual_clip does not apply.
"""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import Algorithm, Comparison, Range
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class CISPO(Algorithm):
    clip: Range = Range(1.0, 4.0)
    comparison: Comparison = Comparison()

    make_batch, returns = GRPO.make_batch, GRPO.returns

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        bounded = jnp.clip(ratio, 1.0 - self.clip.low, 1.0 + self.clip.high)
        weight = jax.lax.stop_gradient(bounded)
        current = jnp.where(batch.mask, logprobs, 0.0)
        return -weight * jnp.where(batch.mask, batch.advantages, 0.0) * current

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Return tokens with a clipped weight, for either sign of the advantage; bool [B, T]."""
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        return {
            'policy/clip_frac_high': ratio > 1.0 + self.clip.high,
            'policy/clip_frac_low': ratio < 1.0 - self.clip.low,
        }
