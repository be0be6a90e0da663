"""Correction of differences between sampler and trainer: TIS and IcePop."""

import jax
import jax.numpy as jnp

from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.rl.losses import log_ratio
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.types import Batch


def correct(
    batch: Batch, sampler_logprobs: jax.Array, settings: UpdateSettings
) -> tuple[Batch, dict[str, jax.Array]]:
    """Multiply advantages by bounded pi_old / pi_sampler (sampler_weights).

    Truncated importance sampling or IcePop, if sampler and trainer differ. Returns (batch,
    metrics). batch.old_logprobs are the trainer's; sampler_logprobs float32 [B, T].
    """
    rows, sampler = (batch.old_logprobs, sampler_logprobs, batch.mask), settings.sampler
    (low, high), drop = sampler.bounds, sampler.correction == 'icepop'
    weights = sampler_weights(*rows, low=low, high=high, drop=drop)
    raw = sampler_weights(*rows, low=0.0, high=jnp.inf, drop=False)
    gap = jnp.where(batch.mask, jnp.abs(batch.old_logprobs - sampler_logprobs), 0.0)
    return batch.replace(advantages=batch.advantages * weights), {
        'sampler/logprob_gap': gap.max(),
        'sampler/outside': masked_mean((raw < low) | (raw > high), batch.mask),
        'sampler/weight': masked_mean(weights, batch.mask),
    }


def sampler_weights(
    old_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    *,
    low: float,
    high: float,
    drop: bool,
) -> jax.Array:
    """pi_old / pi_sampler, a constant factor of the advantages if sampler and trainer differ.

    drop=False clips to [low, high] (truncated importance sampling: 0, 2). drop=True sets weights
    outside [low, high] to 0 (IcePop: .5, 5). [B, T]; 0 off the mask. The clipped loss scales with
    the advantage.
    """
    log_weight = log_ratio(old_logprobs, sampler_logprobs, mask)
    weight = jnp.exp(jax.lax.stop_gradient(log_weight))
    weight_in_range = jnp.where((weight >= low) & (weight <= high), weight, 0.0)
    return jnp.where(mask, weight_in_range if drop else jnp.clip(weight, low, high), 0.0)
