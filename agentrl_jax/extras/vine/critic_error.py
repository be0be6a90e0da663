"""How good a critic is: its values at the starts of turns beside what was earned from there.

A continuation from the start of turn k is a fair sample of the value of that state under the policy
that played it, so the mean of M of them is a label without bias and of known noise s^2 / M, where
explained variance compares values with the one return that each episode had.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.extras.vine.credit import continued
from agentrl_jax.extras.vine.forks import CONTINUATIONS
from agentrl_jax.rl.advantages import drop_rounding, equal
from agentrl_jax.rl.masked import masked_mean, masked_sum, masked_var
from agentrl_jax.types import Rollout


def at_turn_starts(values: jax.Array, rollout: Rollout) -> jax.Array:
    """V before the first token of each answer: [B, T] -> [B, K], 0 for turns that were not played.

    values[b, t] is of the state before tokens[b, t] was chosen.
    """
    turns = jnp.arange(rollout.rewards.shape[1])[None, :, None]
    sampled = (rollout.turn[:, None] == turns) & rollout.action_mask[:, None]
    found = jnp.take_along_axis(values, jnp.argmax(sampled, axis=2), axis=1)
    return jnp.where(sampled.any(2), found, 0.0)


def label_error(
    values: jax.Array, turn: jax.Array, returns: jax.Array, usable: jax.Array
) -> dict[str, jax.Array]:
    """Values [B, K] beside labels m, the means of the returns of continuations; [] each.

    turn, returns, usable [B, F]: where a continuation begins, what it earned from there, whether it
    counts. Over turn starts with two or more, whose labels have the noise s^2 / M:
      error   root of mean (V - m)^2 - mean s^2 / M: as of the exact values
      spread  root of var m - mean s^2 / M: the error of a critic that knows their mean alone
      corr    cov(V, m) / (std V x spread): its correlation with the exact values
    Differences below 0 count as 0; nan where there are no two such starts or nothing to divide by.
    """
    total, count = continued(turn, returns, usable, turns=values.shape[1])
    label, known = total / jnp.maximum(count, 1), count >= 2
    apart = (returns - jnp.take_along_axis(label, turn, axis=1)) ** 2
    squares, _ = continued(turn, apart, usable, turns=values.shape[1])
    noise = masked_mean(squares / jnp.maximum(count * (count - 1), 1), known)
    error = masked_mean((values - label) ** 2, known) - noise
    spread = masked_var(label, known, ddof=1)
    spread = drop_rounding(spread - noise, spread + noise)
    moved = masked_var(values, known, ddof=1)
    together = masked_sum((values - masked_mean(values, known)) * label, known)
    varied = (spread > 0) & ~equal(label, known) & ~equal(values, known)
    size = jnp.sqrt(jnp.where(varied, spread * moved, 1.0))
    corr = together / jnp.maximum(known.sum() - 1, 1) / size
    found = {
        'error': jnp.sqrt(jnp.maximum(error, 0.0)),
        'spread': jnp.sqrt(jnp.maximum(spread, 0.0)),
        'corr': jnp.where(varied, jnp.clip(corr, -1.0, 1.0), jnp.nan),
    }
    return {name: jnp.where(known.sum() >= 2, x, jnp.nan) for name, x in found.items()}


def critic_error(values: jax.Array, rollout: Rollout, *, whole: bool) -> dict[str, jax.Array]:
    """label_error of values [B, T] by the rollout's continuations, as metrics.

    whole: the values are of all that an episode earns, also of what it earned before the turn.
    """
    continuations = rollout.extra[CONTINUATIONS]
    forks, turn = continuations.rollout, continuations.turn
    returns = forks.returns
    if whole:
        paid = rollout.turn_returns
        before = jnp.cumsum(paid, axis=1) - paid
        returns = returns + jnp.take_along_axis(before, turn, axis=1)
    usable = (turn > 0) & forks.healthy & rollout.healthy[:, None]
    found = label_error(at_turn_starts(values, rollout), turn, returns, usable)
    return {f'value/vine_{name}': x for name, x in found.items()}
