"""Rows of a teacher, with a hint after the prefix that the policy does not read.

  policy   prefix, first prompt, answer, second prompt, ...
  teacher  prefix, hint, first prompt, answer, second prompt, ...
Every row starts with the prefix, for full episodes and for windows (rollout.windows). The hint is
therefore always at the same position, before all sampled tokens. It does not change the tokens
around it: text.task rejects other hints. Results of the teacher are moved back to the positions of
the policy.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.types import Params


def insert(
    tokens: jax.Array, attention: jax.Array, hint: jax.Array, *, prefix: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Insert hints after the first `prefix` tokens of rows.

    tokens int32, attention bool [B, T]; hint int32 [B, H], -1 past the end. Returns tokens int32
    and attention bool [B, T + H], and places int32 [B, T]: position places[b, t] has read
    tokens[b, :t + 1] and, from the last token of the prefix on, the hint.
    """
    in_hint, column = hint >= 0, jnp.arange(tokens.shape[1])[None]
    count = in_hint.sum(1, keepdims=True)
    width = tokens.shape[1] + hint.shape[1]
    positions = column + jnp.where(column >= prefix, count, 0)
    between = jnp.where(in_hint, prefix + jnp.arange(hint.shape[1])[None], width)
    rows = jnp.arange(tokens.shape[0])[:, None]

    def join(x, inserted):
        empty = jnp.zeros((tokens.shape[0], width), x.dtype)
        return empty.at[rows, positions].set(x).at[rows, between].set(inserted, mode='drop')

    places = column + jnp.where(column >= prefix - 1, count, 0)
    return join(tokens, hint), join(attention, in_hint), places


def read_hint(
    fns: ModelFns,
    params: Params,
    tokens: jax.Array,
    attention: jax.Array,
    hint: jax.Array | None,
    *,
    prefix: int,
) -> jax.Array:
    """Return hidden states [B, T, D] of a model that reads the rows with hints; None: without."""
    if hint is None:
        return fns.hidden(params, tokens, positions_of(attention), attention)
    tokens, attention, places = insert(tokens, attention, hint, prefix=prefix)
    states = fns.hidden(params, tokens, positions_of(attention), attention)
    return jnp.take_along_axis(states, places[:, :, None], axis=1)
