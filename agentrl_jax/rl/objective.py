"""The full objective: an algorithm's per-token surrogate, entropy, KL, critic loss and metrics."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import Forward, UpdateSettings
from agentrl_jax.rl.masked import masked_sum, positions_of
from agentrl_jax.types import Batch, Params

GAP = 'sampler/logprob_gap'  # from the first optimiser step, which still has the sampling policy
MAXIMA = ('policy/ratio_max', GAP)  # reduced by max; all other metrics are summed


def ratio_sums(logprobs: jax.Array, batch: Batch) -> dict:
    """Sums of ratio metrics over trained tokens; maxima for those in MAXIMA."""
    log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
    ratio = jnp.exp(log_ratio)
    return {
        'policy/kl_old': masked_sum(-log_ratio, batch.mask),  # k1 of KL(pi_old || pi)
        'policy/kl_old_k3': masked_sum(ratio - 1.0 - log_ratio, batch.mask),
        'policy/ratio_max': jnp.max(jnp.where(batch.mask, ratio, 0.0)),
        GAP: jnp.max(jnp.abs(log_ratio)),  # 0 off the mask
    }


def policy_loss(
    params: Params,
    batch: Batch,
    weights: jax.Array,
    value_weights: jax.Array | None,
    kl_coef: jax.Array,
    fns: ModelFns,
    settings: UpdateSettings,
    extra_losses: Sequence[Callable] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """sum(weights * (surrogate - entropy_coef H + kl_coef KL)); returns (loss, metric sums).

    If a critic shares the backbone (fns.value_head), critic.coef * value loss is added. weights,
    value_weights float32 [B, T]: losses.token_weights of the full optimiser batch. The KL is
    measured if there is a reference; it is in the loss if algorithm.kl.in_loss. extra_losses: of
    extensions, (forward, batch, weights) -> (loss term, metric sums).
    """
    algorithm, attention = settings.algorithm, batch.attention_mask
    rows = batch.tokens, positions_of(attention), attention
    hidden = fns.hidden(params, *rows)
    logprobs, entropy = losses.token_logprobs(
        hidden,
        fns.head(params),
        batch.tokens,
        settings.head,
        with_entropy=True,
        mask=batch.mask,
        allowed=batch.allowed,
    )
    per_token, fixed = algorithm.loss(logprobs, batch), jax.lax.stop_gradient(logprobs)
    sums = ratio_sums(fixed, batch)
    for name, tokens in algorithm.clipped(fixed, batch).items():
        sums[name] = masked_sum(tokens, batch.mask)
    sums['policy/entropy'] = masked_sum(jax.lax.stop_gradient(entropy), batch.mask)
    sums['policy/surrogate'] = losses.weighted_sum(weights, per_token)
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    if algorithm.kl.in_loss or settings.has_reference:
        estimator = algorithm.kl.estimator if algorithm.kl.in_loss else 'k3'
        kl = losses.kl_penalty(logprobs, batch.ref_logprobs, batch.mask, estimator=estimator)
        sums['policy/kl_ref'] = jax.lax.stop_gradient(kl).sum()
        if algorithm.kl.in_loss:
            per_token = per_token + kl_coef * kl
    forward = Forward(params, hidden, fixed)
    added = [extra_loss(forward, batch, weights) for extra_loss in extra_losses]
    total = sum((term for term, _ in added), losses.weighted_sum(weights, per_token))
    for _, measured in added:
        sums |= jax.lax.stop_gradient(measured)
    if fns.value_head is None:
        return total, sums
    raw = fns.value_head(params, hidden)
    value, more = value_loss(raw, batch, value_weights, clip_value=settings.critic.clip or None)
    return total + settings.critic.coef * value, {**sums, **more, 'value/loss': value}


def value_loss(
    raw: jax.Array, batch: Batch, weights: jax.Array, *, clip_value: float | None
) -> tuple[jax.Array, dict]:
    """Clipped value loss from raw critic outputs [B, T]; returns (loss, metric sums)."""
    values = losses.token_values(raw)
    per_token = losses.clipped_value_loss(
        values, batch.old_values, batch.returns, batch.value_mask, clip_value=clip_value
    )
    sums = {}
    if clip_value is not None:
        moved = jnp.abs(values - batch.old_values) > clip_value
        sums['value/clip_frac'] = masked_sum(moved, batch.value_mask)
    return losses.weighted_sum(weights, per_token), sums
