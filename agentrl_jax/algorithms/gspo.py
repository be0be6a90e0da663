"""GSPO: GRPO with one importance ratio per sequence, or per turn (arXiv:2507.18071).

  s = exp(mean over the sequence's trained tokens of log pi - log pi_old)
  loss_t = clipped surrogate of the ratio sg(s) pi / sg(pi), which has the value of s
Clip ranges are far smaller than PPO's, 3e-4 and 4e-4; rows weigh the same (seq_mean_token_mean).
`turn_loss` takes the mean over the turn of a token instead ('gspo_turn').

A sequence is what one prompt conditions: the episode, where the policy sees the whole conversation.
Where it sees only the last turns (context.window > 0) that is the turn, each with a prompt of its
own, and its ratio is that of gspo_turn; gspo, whose ratio would be of rows with other prompts, is
refused there. The ratio is the row's own, but what a row weighs is not: the rows of an episode are
one sequence in every aggregation (losses.token_weights).
"""

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import common, grpo
from agentrl_jax.rl import losses, objective
from agentrl_jax.types import Batch

USES_CRITIC = False
SETTINGS = grpo.SETTINGS
DEFAULTS = grpo.DEFAULTS | {
    'loss.clip_low': 3e-4,
    'loss.clip_high': 4e-4,
    'loss.kl_coef': 0.0,
}
make_batch = grpo.make_batch


def segment_log_ratio(logprobs: jax.Array, batch: Batch, segment: jax.Array) -> jax.Array:
    """Mean log-ratio over the segment int32 [B, T] of a token, 0 off the mask; [B, T]."""
    log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
    return common.segment_mean(log_ratio, segment, batch.mask)


def segment_loss(logprobs: jax.Array, batch: Batch, segment: jax.Array, **clip: float) -> jax.Array:
    """Surrogate of the mean log-ratio over segments of a row; [B, T]."""
    mean = segment_log_ratio(logprobs, batch, segment)
    current = jnp.where(batch.mask, logprobs, 0.0)
    own = jax.lax.stop_gradient(mean - current) + current  # value of the mean, gradient of log pi
    own = jnp.where(batch.mask, own, 0.0)
    return losses.clipped_surrogate(own, batch.advantages, batch.mask, **clip)


def segment_clipped(logprobs: jax.Array, batch: Batch, segment: jax.Array, **clip: float) -> dict:
    """The tokens of the segments that are clipped; bool [B, T] by metric."""
    mean = segment_log_ratio(logprobs, batch, segment)
    return objective.clipped_sides(mean, batch.advantages, **clip)


def loss(logprobs: jax.Array, batch: Batch, **clip: float) -> jax.Array:
    """One ratio per row; [B, T]."""
    return segment_loss(logprobs, batch, jnp.zeros_like(batch.turn), **clip)


def clipped(logprobs: jax.Array, batch: Batch, **clip: float) -> dict:
    """What loss clips."""
    return segment_clipped(logprobs, batch, jnp.zeros_like(batch.turn), **clip)


def turn_loss(logprobs: jax.Array, batch: Batch, **clip: float) -> jax.Array:
    """One ratio per turn; [B, T]."""
    return segment_loss(logprobs, batch, batch.turn, **clip)


def turn_clipped(logprobs: jax.Array, batch: Batch, **clip: float) -> dict:
    """What turn_loss clips."""
    return segment_clipped(logprobs, batch, batch.turn, **clip)
