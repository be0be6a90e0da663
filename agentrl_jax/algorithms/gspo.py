"""GSPO: GRPO with one importance ratio per sequence, or per turn (arXiv:2507.18071).

  s = exp(mean over the sequence's trained tokens of log pi - log pi_old)
  loss_t = clipped surrogate of the ratio sg(s) pi / sg(pi), which has the value of s
Clip ranges are far smaller than PPO's: the paper has 3e-4 and 4e-4, with seq_mean_token_mean.
`turn_loss` takes the mean over the turn of a token instead ('gspo_turn').
"""

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import common, grpo
from agentrl_jax.rl import losses
from agentrl_jax.types import Batch

USES_CRITIC = False
SETTINGS = grpo.SETTINGS
make_batch = grpo.make_batch


def segment_loss(
    logprobs: jax.Array, batch: Batch, segment: jax.Array, clip_low, clip_high, dual_clip
) -> jax.Array:
    """Surrogate of the mean log-ratio over segments int32 [B, T] of a row; [B, T]."""
    log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
    mean = common.segment_mean(log_ratio, segment, batch.mask)
    current = jnp.where(batch.mask, logprobs, 0.0)
    own = jax.lax.stop_gradient(mean - current) + current  # value of the mean, gradient of log pi
    return losses.clipped_surrogate(
        jnp.where(batch.mask, own, 0.0),
        batch.advantages,
        batch.mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def loss(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> jax.Array:
    """One ratio per row; [B, T]."""
    whole = jnp.zeros_like(batch.turn)
    return segment_loss(logprobs, batch, whole, clip_low, clip_high, dual_clip)


def turn_loss(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> jax.Array:
    """One ratio per turn; [B, T]."""
    return segment_loss(logprobs, batch, batch.turn, clip_low, clip_high, dual_clip)
