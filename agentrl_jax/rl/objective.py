"""The objective around an algorithm's per-token surrogate: entropy, KL, the critic, and metrics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import masked_sum, positions_of
from agentrl_jax.types import Batch, Params


def clipped_loss(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> jax.Array:
    """losses.clipped_policy_loss of a batch; [B, T]."""
    return losses.clipped_policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def clipped_sides(
    log_ratios: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> dict[str, jax.Array]:
    """Where losses.clipped_surrogate is flat, by the name of the metric; bool [B, T] each."""
    ratio, up, down = jnp.exp(log_ratios), advantages > 0, advantages < 0
    sides = {
        'policy/clip_frac_high': up & (ratio > 1.0 + clip_high),
        'policy/clip_frac_low': down & (ratio < 1.0 - clip_low),
    }
    if dual_clip is not None:
        sides['policy/clip_frac_dual'] = down & (ratio > dual_clip)
    return sides


def clipped_tokens(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> dict[str, jax.Array]:
    """What clipped_loss clips; bool [B, T] by metric."""
    return clipped_sides(
        losses.log_ratio(logprobs, batch.old_logprobs, batch.mask),
        batch.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def nothing_clipped(logprobs: jax.Array, batch: Batch, **clip: float | None) -> dict:
    """Of a loss without a ratio: no metric of clipping."""
    del logprobs, batch, clip
    return {}


def ratio_sums(logprobs: jax.Array, batch: Batch) -> dict:
    """Sums over trained tokens of what the ratio does; maxima where update.MAXIMA says so."""
    log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
    ratio = jnp.exp(log_ratio)
    return {
        'policy/kl_old': masked_sum(-log_ratio, batch.mask),  # k1 of KL(pi_old || pi)
        'policy/kl_old_k3': masked_sum(ratio - 1.0 - log_ratio, batch.mask),
        'policy/ratio_max': jnp.max(jnp.where(batch.mask, ratio, 0.0)),
        'sampler/logprob_gap': jnp.max(jnp.abs(log_ratio)),  # 0 off the mask
    }


def policy_loss(
    params: Params,
    batch: Batch,
    weights: jax.Array,
    kl_coef: jax.Array,
    *,
    hidden_fn: Callable,
    head_fn: Callable,
    loss: Callable = clipped_loss,
    clipped: Callable = clipped_tokens,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_estimator: str | None = None,
    has_reference: bool = False,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    row_tokens: int | None = None,
) -> tuple[jax.Array, tuple[dict, jax.Array]]:
    """sum of weights * (surrogate - entropy_coef H + kl_coef KL); (loss, (metric sums, hidden)).

    weights float32 [B, T] from losses.token_weights on the whole optimiser batch. clipped: what the
    loss clips, bool [B, T] by metric. kl_estimator None leaves the KL term out; with has_reference
    it is measured all the same. row_tokens: the most that a row can have of trained tokens; the
    head is computed for so many (None: for all).
    """
    hidden = hidden_fn(
        params, batch.tokens, positions_of(batch.attention_mask), batch.attention_mask
    )
    logprobs, entropy = losses.token_logprobs(
        hidden,
        head_fn(params),
        batch.tokens,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=True,
        mask=batch.mask,
        row_tokens=row_tokens,
    )
    clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    per_token, fixed = loss(logprobs, batch, **clip), jax.lax.stop_gradient(logprobs)
    sums = ratio_sums(fixed, batch)
    for name, tokens in clipped(fixed, batch, **clip).items():
        sums[name] = masked_sum(tokens, batch.mask)
    sums['policy/entropy'] = masked_sum(jax.lax.stop_gradient(entropy), batch.mask)
    sums['policy/surrogate'] = losses.weighted_sum(weights, per_token)
    if entropy_coef:
        per_token = per_token - entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    if kl_estimator is not None or has_reference:
        estimator = kl_estimator or 'k3'
        kl = losses.kl_penalty(logprobs, batch.ref_logprobs, batch.mask, estimator=estimator)
        sums['policy/kl_ref'] = jax.lax.stop_gradient(kl).sum()
        if kl_estimator is not None:
            per_token = per_token + kl_coef * kl
    return losses.weighted_sum(weights, per_token), (sums, hidden)


def value_loss(
    raw: jax.Array, batch: Batch, weights: jax.Array, *, clip_value: float | None
) -> tuple[jax.Array, dict]:
    """sum of weights * clipped value loss, raw critic output [B, T]; (loss, metric sums)."""
    values = losses.token_values(raw)
    per_token = losses.clipped_value_loss(
        values, batch.old_values, batch.returns, batch.value_mask, clip_value=clip_value
    )
    sums = {}
    if clip_value is not None:
        moved = jnp.abs(values - batch.old_values) > clip_value
        sums['value/clip_frac'] = masked_sum(moved, batch.value_mask)
    return losses.weighted_sum(weights, per_token), sums
