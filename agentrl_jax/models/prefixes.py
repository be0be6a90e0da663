"""Forward passes that compute prefixes shared by neighbouring rows only once.

Rows of a group start with the same prompt and often with the same answers. A unit is a fixed
number of neighbouring rows. Its first row, the lead, is read in full. The other rows contribute
only their rest: the tokens after the prefix that they share with the lead. The model reads a unit
as one long row:

  lead  t_0 ... t_T | rest of the second row | rest of the third row | ...

Each token attends to the earlier tokens of its own row: the shared prefix in the lead, then the
rest. Positions count within the row. Every state therefore equals that of forward() up to
rounding, and the gradient of a shared token is summed over the rows. Prefix Grouper
(arXiv:2506.05433) does this for groups with one prompt of known length.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from agentrl_jax.models.base import Model
from agentrl_jax.types import Params


@struct.dataclass
class Packed:
    """n units of u rows of T tokens, packed as n rows of O = T + (u - 1) * S; each rest has S."""

    tokens: jax.Array  # int32 [n, O]
    positions: jax.Array  # int32 [n, O]
    lead: jax.Array  # bool [n, T, T]  attention mask of the lead: [query, key]
    rest: jax.Array  # bool [n * (u - 1), S, T + S]  mask of each rest; keys: the lead, then itself
    places: jax.Array  # int32 [n, u * T]  index in the unit of each token of its rows


def shared(tokens: jax.Array, attention: jax.Array, unit: int) -> jax.Array:
    """Length of the prefix that each row shares with the first row of its unit; int32 [n, u].

    tokens int32, attention bool [n * u, T]. For a lead it is the full length.
    """
    rows, real = (x.reshape(-1, unit, x.shape[-1]) for x in (tokens, attention))
    same = (rows == rows[:, :1]) & real & real[:, :1]
    return jnp.cumprod(same, axis=-1, dtype=jnp.int32).sum(-1)


def rest(tokens: jax.Array, attention: jax.Array, lengths: jax.Array, unit: int) -> jax.Array:
    """Columns after the shared prefix of the first `lengths` tokens, 0 for leads; int32 [n * u]."""
    common = shared(tokens, attention, unit)
    needed = jnp.maximum(lengths.reshape(-1, unit) - common, 0)
    return needed.at[:, 0].set(0).reshape(-1)


def pack(tokens: jax.Array, attention: jax.Array, *, unit: int, room: int) -> Packed:
    """Pack rows int32 and bool [n * u, T] into units, with `room` columns for each rest.

    Tokens that do not fit are dropped, and their entries in `places` are meaningless.
    """
    length, common = tokens.shape[1], shared(tokens, attention, unit)[:, 1:, None]
    rows, real = (x.reshape(-1, unit, length) for x in (tokens, attention))
    column, place = jnp.arange(length), jnp.arange(room)
    after = common + place[None, None]  # columns of the rest, [n, u - 1, S]
    within = jnp.minimum(after, length - 1)

    def join(lead, others):
        return jnp.concatenate([lead, others.reshape(len(rows), -1)], axis=1)

    def of_rest(x):
        return jnp.take_along_axis(x[:, 1:], within, axis=2)

    prefix = jnp.broadcast_to((column[None, None] < common)[:, :, None], (*after.shape, length))
    causal = (place[:, None] >= place[None])[None, None]
    within_rest = causal & (of_rest(real) & (after < length))[:, :, None]
    rest = jnp.concatenate([prefix, within_rest], axis=-1).reshape(-1, room, length + room)
    first = length + room * jnp.arange(unit - 1)[None, :, None]
    places = jnp.minimum(column[None, None] - common, room - 1) + first
    places = jnp.where(column[None, None] < common, column[None, None], places)
    index = jnp.broadcast_to(column, (len(rows), length))
    return Packed(
        tokens=join(rows[:, 0], of_rest(rows)),
        positions=join(index, after),
        lead=(column[:, None] >= column[None])[None] & real[:, :1],
        rest=rest,
        places=join(index, places),
    )


def forward(
    config: Model,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
    *,
    unit: int,
    room: int,
    row_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Final hidden states [B, T, D] of rows in which each `unit` neighbours may share a prefix.

    Equals config.forward on the shared prefix of a row and the next `room` columns. Later columns
    are finite but meaningless. positions: 0, 1, ... in each row.
    """
    del positions
    packed = pack(tokens, attention_mask, unit=unit, room=room)
    arrays = packed.tokens, packed.positions, packed.lead, packed.rest
    hidden = config.forward_units(params, *arrays, row_sharding=row_sharding)
    states = jnp.take_along_axis(hidden, packed.places[:, :, None], axis=1)
    return states.reshape(*tokens.shape, -1)
