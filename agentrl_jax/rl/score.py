"""Values and log-probabilities of a rollout under the critic, the reference and the policy."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rollout.windows import WindowIndex, own_turn_mask, scatter_back, split_turns
from agentrl_jax.types import Demonstrations, Params, Rollout, Scores


class TokenRows(NamedTuple):
    """Rows of tokens to score."""

    tokens: jax.Array  # int32 [B, T]
    attention_mask: jax.Array  # bool [B, T]
    mask: jax.Array | None  # bool [B, T]  tokens to score; None: all
    allowed: jax.Array | None  # uint32 [B, T, W]  as Rollout.allowed

    @classmethod
    def of(cls, rollout: Rollout | Demonstrations, windows: WindowIndex | None) -> 'TokenRows':
        """Return the rows of a rollout; with windows, one row per turn, as the policy read it."""
        rows = cls(rollout.tokens, rollout.attention_mask, rollout.action_mask, rollout.allowed)
        if windows is None:
            return rows
        mask = own_turn_mask(rows.mask, windows)
        return split_turns(rows._replace(mask=None), windows)._replace(mask=mask)

    def hidden(self, fns: ModelFns, params: Params) -> jax.Array:
        """Return the hidden states [B, T, D] of a model."""
        attention = self.attention_mask
        return fns.hidden(params, self.tokens, positions_of(attention), attention)

    def logprobs(self, hidden: jax.Array, head: jax.Array, settings: UpdateSettings) -> jax.Array:
        """Return the log-probabilities [B, T] of the tokens from hidden states [B, T, D]."""
        masks = dict(mask=self.mask, allowed=self.allowed)
        return losses.token_logprobs(hidden, head, self.tokens, settings.head, **masks)[0]


def score_rows(fn: Callable, rows: tuple, microbatch_rows: int) -> Any:
    """Apply fn to slices of microbatch_rows rows in sequence and join the results.

    Only the rows of an update must be a multiple of microbatch_rows. Other numbers are split into
    equal slices of at least half that size, or copies of the first row pad the last slice.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    limit = min(microbatch_rows, count)
    size = math.gcd(count, microbatch_rows)
    size = limit if 2 * size < limit else size
    total = -(-count // size) * size
    if total > count:
        rows = jax.tree.map(
            lambda x: jnp.concatenate([x, jnp.repeat(x[:1], total - count, axis=0)]), rows
        )
    # Row i goes to slice i % n, so that every slice has rows from each device's block.
    parts = jax.tree.map(
        lambda x: x.reshape(size, total // size, *x.shape[1:]).swapaxes(0, 1), rows
    )
    out = jax.lax.map(lambda part: fn(*part), parts)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(total, *x.shape[2:])[:count], out)


def of_tokens(
    fn: Callable,
    rows: tuple,
    *,
    rollout: Rollout | Demonstrations,
    settings: UpdateSettings,
    windows: WindowIndex | None,
) -> Any:
    """Apply fn to slices of rows (TokenRows.of the rollout, further arrays); results [B, T]."""
    scores = score_rows(fn, rows, settings.batch.microbatch_rows)
    if windows is None:
        return scores
    return jax.tree.map(lambda x: scatter_back(x, windows, rollout.tokens.shape[1]), scores)


def score(
    params: Params,
    critic_params: Params | None,
    ref_params: Params | None,
    rollout: Rollout | Demonstrations,
    *,
    fns: ModelFns,
    settings: UpdateSettings,
    recompute: bool,
    windows: WindowIndex | None = None,
) -> Scores:
    """Score every token; zeros for a missing critic or reference.

    The old log-probabilities are the sampler's, or with `recompute` the trainer's (for a sampler of
    another precision). With windows, every token is scored in the context that the policy had.
    """
    rows, with_next = TokenRows.of(rollout, windows), settings.algorithm.bootstrap_truncated

    def logprobs(model):
        return lambda rows: rows.logprobs(rows.hidden(fns, model), fns.head(model), settings)

    def values(rows):
        model_inputs = rows.tokens, positions_of(rows.attention_mask), rows.attention_mask
        raw = fns.values(params, critic_params, *model_inputs)
        return (losses.token_values(raw), raw) if with_next else losses.token_values(raw)

    every = functools.partial(of_tokens, rollout=rollout, settings=settings, windows=windows)
    zeros = jnp.zeros_like(rollout.logprobs)
    old, ref, value, following = rollout.logprobs, zeros, zeros, None
    if recompute:
        old = every(logprobs(params), (rows,))
    if ref_params is not None:
        ref = every(logprobs(ref_params), (rows,))
    if fns.values is not None:
        value = every(values, (rows._replace(mask=None, allowed=None),))
        if with_next:
            value, following = value
    mask = rollout.action_mask
    old, ref, value, following = (
        None if x is None else jnp.where(mask, x, 0.0) for x in (old, ref, value, following)
    )
    return Scores(old, ref, value, following)
