"""Metrics of an update, which change nothing: sums over micro-batches, reduced over its steps."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.rl import losses
from agentrl_jax.rl.advantages import equal
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.rl.learning import Extra, Optim
from agentrl_jax.rl.masked import masked_max, masked_mean, masked_sum, masked_var
from agentrl_jax.types import Batch, TrainState

GAP = 'sampler/logprob_gap'  # from the first optimiser step, which still has the sampling policy
MAXIMA = ('policy/ratio_max', GAP)  # reduced by max; all other metrics are summed
NOT_PER_TOKEN = (*MAXIMA, 'policy/surrogate', 'value/loss')  # not divided by a token count


def policy_sums(
    logprobs: jax.Array, entropy: jax.Array, batch: Batch, algorithm: Algorithm
) -> dict[str, jax.Array]:
    """Sums of ratios, clipped tokens and entropy over trained tokens; see ratio_sums."""
    sums = ratio_sums(logprobs, batch)
    for name, tokens in algorithm.clipped(logprobs, batch).items():
        sums[name] = masked_sum(tokens, batch.mask)
    return sums | {'policy/entropy': masked_sum(jax.lax.stop_gradient(entropy), batch.mask)}


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


def policy_means(
    sums: dict, tokens: jax.Array, value_tokens: jax.Array, extras: Sequence[tuple[Extra, Any]]
) -> dict[str, jax.Array]:
    """Divide sums by their tokens. extras: extensions and the number of tokens of their metrics."""
    counts = {name: value_tokens if name.startswith('value/') else tokens for name in sums}
    counts |= dict.fromkeys(NOT_PER_TOKEN, 1)
    for extra, total in extras:
        counts |= dict.fromkeys(extra.METRICS, total)
    return {name: x / jnp.maximum(counts[name], 1) for name, x in sums.items()}


def learning_rates(
    state: TrainState, optim: Optim, critic_updates: int = 1
) -> dict[str, jax.Array]:
    """Return the learning rates of the next optimiser step as metrics; float32 [].

    A critic that shares the policy's backbone has no separate rate.
    """

    def at(rate, opt_state):
        if callable(rate):
            rate = rate(opt_state[1][0].count)  # Adam's count: excludes skipped steps
        return jnp.float32(rate)

    rates = {'optim/lr': at(optim.rate(optim.lr), state.opt_state)}
    if state.critic_params is not None:
        rate = optim.rate(optim.critic_lr, critic_updates)
        rates['optim/critic_lr'] = at(rate, state.critic_opt_state)
    return rates


def trained_episodes(mask: jax.Array, together: int) -> jax.Array:
    """Count episodes with a trained token; mask bool [B, T], `together` adjacent rows each."""
    trains = mask.any(1)
    return trains.sum() if together == 1 else trains.reshape(-1, together).any(1).sum()


def reduce_steps(steps: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reduce metrics over optimiser steps, [S] -> []: means, and maxima for MAXIMA.

    Only finite values count. Without any the result is nan: an update that trained nothing must not
    look like a loss of 0.
    """
    out = {}
    for name, x in steps.items():
        finite = jnp.isfinite(x)
        value = masked_max(x, finite) if name in MAXIMA else masked_mean(x, finite)
        if name == GAP:  # the policy differs from the sampling policy in later steps
            value = x[jnp.argmax(finite)]
        out[name] = jnp.where(finite.any(), value, jnp.nan).astype(jnp.float32)
    return out


def batch_metrics(batch: Batch, has_critic: bool, together: int = 1) -> dict[str, jax.Array]:
    """Metrics of a batch before its update: trained tokens, advantages, explained variance.

    together: rows per episode.
    """
    counts = {
        'batch/trained_tokens': batch.mask.sum(),
        'batch/trained_rows': trained_episodes(batch.mask, together),
        'batch/tokens': (batch.attention_mask & batch.mask.any(1, keepdims=True)).sum(),
    }
    metrics = {name: x.astype(jnp.float32) for name, x in counts.items()}
    metrics['batch/advantage_std'] = jnp.sqrt(masked_var(batch.advantages, batch.mask))
    if has_critic:
        # 1 - var(R - V) / var(R); 0 if the returns vary only by rounding
        spread = masked_var(batch.returns, batch.value_mask)
        rest = masked_var(batch.returns - batch.old_values, batch.value_mask)
        scale = jnp.abs(batch.returns) + jnp.abs(batch.old_values)
        varied = ~equal(batch.returns, batch.value_mask, scale)
        explained = jnp.where(varied, 1.0 - rest / jnp.where(varied, spread, 1.0), 0.0)
        metrics['value/explained_variance'] = explained
    return metrics
