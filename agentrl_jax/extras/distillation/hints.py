"""Rows as a teacher reads them: with a hint after the prefix, which the policy does not read.

  policy   prefix, first prompt, answer, second prompt, ...
  teacher  prefix, hint, first prompt, answer, second prompt, ...
The prefix is in front of every row, of whole episodes as of windows (rollout.windows), so one place
serves all, and every token that was sampled comes after the hint. The tokens around it are the
same as without it: text.task rejects other hints. What the teacher computes is then moved back to
the positions that the policy has.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.types import Params


def insert(
    tokens: jax.Array, attention: jax.Array, hint: jax.Array, *, prefix: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows with their hints after the first `prefix` tokens, and where each position went.

    tokens int32, attention bool [B, T]; hint int32 [B, H], -1 past the end. Returns tokens int32
    and attention bool [B, T + H], and places int32 [B, T]: what is computed at places[b, t] has
    read tokens[b, :t + 1] and, from the last token of the prefix on, the hint.
    """
    given, column = hint >= 0, jnp.arange(tokens.shape[1])[None]
    count = given.sum(1, keepdims=True)
    width = tokens.shape[1] + hint.shape[1]
    own = column + jnp.where(column >= prefix, count, 0)
    between = jnp.where(given, prefix + jnp.arange(hint.shape[1])[None], width)
    rows = jnp.arange(tokens.shape[0])[:, None]

    def join(x, inserted):
        empty = jnp.zeros((tokens.shape[0], width), x.dtype)
        return empty.at[rows, own].set(x).at[rows, between].set(inserted, mode='drop')

    places = column + jnp.where(column >= prefix - 1, count, 0)
    return join(tokens, hint), join(attention, given), places


def read_hint(
    fns: ModelFns,
    params: Params,
    tokens: jax.Array,
    attention: jax.Array,
    hint: jax.Array | None,
    *,
    prefix: int,
) -> jax.Array:
    """States [B, T, D] of a model that has read the rows with their hints; None: as they are."""
    if hint is None:
        return fns.hidden(params, tokens, positions_of(attention), attention)
    tokens, attention, places = insert(tokens, attention, hint, prefix=prefix)
    states = fns.hidden(params, tokens, positions_of(attention), attention)
    return jnp.take_along_axis(states, places[:, :, None], axis=1)
