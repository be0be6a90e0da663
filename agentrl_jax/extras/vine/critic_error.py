"""Error of a critic: its values at turn starts, compared with returns of continuations.

The return of a continuation from the start of turn k is an unbiased sample of the value of that
state under the current policy. The mean over M continuations is an unbiased label with known noise
s^2 / M. Explained variance, in contrast, compares values with the single return of each episode.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.extras.vine.credit import continued
from agentrl_jax.extras.vine.forks import CONTINUATIONS
from agentrl_jax.rl.advantages import drop_rounding, equal
from agentrl_jax.rl.masked import masked_mean, masked_sum, masked_var
from agentrl_jax.types import Rollout


def at_turn_starts(values: jax.Array, rollout: Rollout) -> jax.Array:
    """Return V before the first token of each answer: [B, T] -> [B, K], 0 for turns not played.

    values[b, t] is the value of the state before tokens[b, t] was chosen.
    """
    turns = jnp.arange(rollout.rewards.shape[1])[None, :, None]
    sampled = (rollout.turn[:, None] == turns) & rollout.action_mask[:, None]
    starts = jnp.take_along_axis(values, jnp.argmax(sampled, axis=2), axis=1)
    return jnp.where(sampled.any(2), starts, 0.0)


def label_error(
    values: jax.Array, turn: jax.Array, returns: jax.Array, usable: jax.Array
) -> dict[str, jax.Array]:
    """Compare values [B, K] with labels m, the mean returns of continuations; [] each.

    turn, returns, usable [B, F]: first turn of a continuation, its return from there on, whether it
    counts. Over turn starts with two or more continuations, with label noise s^2 / M:
      error   root of mean (V - m)^2 - mean s^2 / M: the error against exact values
      spread  root of var m - mean s^2 / M: the error of a critic that predicts only their mean
      corr    cov(V, m) / (std V x spread): the correlation with exact values
    Differences below 0 count as 0. nan with fewer than two such starts or a zero denominator.
    """
    total, count = continued(turn, returns, usable, turns=values.shape[1])
    label, known = total / jnp.maximum(count, 1), count >= 2
    deviations = (returns - jnp.take_along_axis(label, turn, axis=1)) ** 2
    squares, _ = continued(turn, deviations, usable, turns=values.shape[1])
    noise = masked_mean(squares / jnp.maximum(count * (count - 1), 1), known)
    error = masked_mean((values - label) ** 2, known) - noise
    spread = masked_var(label, known, ddof=1)
    spread = drop_rounding(spread - noise, spread + noise)
    moved = masked_var(values, known, ddof=1)
    covariance = masked_sum((values - masked_mean(values, known)) * label, known)
    varied = (spread > 0) & ~equal(label, known) & ~equal(values, known)
    size = jnp.sqrt(jnp.where(varied, spread * moved, 1.0))
    corr = covariance / jnp.maximum(known.sum() - 1, 1) / size
    metrics = {
        'error': jnp.sqrt(jnp.maximum(error, 0.0)),
        'spread': jnp.sqrt(jnp.maximum(spread, 0.0)),
        'corr': jnp.where(varied, jnp.clip(corr, -1.0, 1.0), jnp.nan),
    }
    return {name: jnp.where(known.sum() >= 2, x, jnp.nan) for name, x in metrics.items()}


def critic_error(values: jax.Array, rollout: Rollout, *, whole: bool) -> dict[str, jax.Array]:
    """Return label_error of values [B, T] with the rollout's continuations, as metrics.

    whole: values predict the full return of an episode, including rewards before the turn.
    """
    continuations = rollout.extra[CONTINUATIONS]
    forks, turn = continuations.rollout, continuations.turn
    returns = forks.returns
    if whole:
        paid = rollout.turn_returns
        before = jnp.cumsum(paid, axis=1) - paid
        returns = returns + jnp.take_along_axis(before, turn, axis=1)
    usable = (turn > 0) & forks.healthy & rollout.healthy[:, None]
    metrics = label_error(at_turn_starts(values, rollout), turn, returns, usable)
    return {f'value/vine_{name}': x for name, x in metrics.items()}
