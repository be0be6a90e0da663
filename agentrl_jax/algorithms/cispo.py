"""CISPO: the importance weight is clipped, never the gradient of a token (arXiv:2506.13585).

  loss_t = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi,  A as in GRPO
The lower side is open: clip_low = 1. The paper names no upper bound; a weight of at most 5 is that
of arXiv:2510.13786. dual_clip does not apply.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import grpo
from agentrl_jax.rl import losses
from agentrl_jax.types import Batch

USES_CRITIC = False
SETTINGS = grpo.SETTINGS
DEFAULTS = {name: value for name, value in grpo.DEFAULTS.items() if name != 'loss.dual_clip'} | {
    'loss.clip_low': 1.0,
    'loss.clip_high': 4.0,
    'loss.kl_coef': 0.0,
    'loss.aggregation': 'token_mean',
}
make_batch = grpo.make_batch


def loss(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> jax.Array:
    """[B, T]."""
    if dual_clip is not None:
        raise ValueError('cispo has no dual_clip: its weight is bounded by 1 + clip_high')
    ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    current = jnp.where(batch.mask, logprobs, 0.0)
    return -weight * jnp.where(batch.mask, batch.advantages, 0.0) * current


def clipped(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> dict[str, jax.Array]:
    """Tokens whose weight is bounded, whatever the sign of their advantage; bool [B, T]."""
    del dual_clip
    ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
    return {
        'policy/clip_frac_high': ratio > 1.0 + clip_high,
        'policy/clip_frac_low': ratio < 1.0 - clip_low,
    }
