"""Rows that begin alike in one forward pass: what each unit of rows has in common is read once.

Rows of a group begin with the same prompt, and often with the same answers to it. Of each unit of
rows side by side the first, the lead, is read whole; of the others only what comes after the
tokens that they share with it. A unit is one long row of the model,

  lead  t_0 ... t_T | rest of the second row | rest of the third row | ...

in which a token attends to what is in front of it in its own row: as many tokens of the lead as its
row shares, and its own rest. Positions are those in its row. So every state is that of forward(),
to rounding, and the gradient of what is shared is the sum over the rows. (Prefix Grouper,
arXiv:2506.05433, does this for groups of one prompt, whose length is known.)
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from agentrl_jax.models.base import Model
from agentrl_jax.types import Params


@struct.dataclass
class Packed:
    """n units of u rows of T tokens as n rows of O = T + (u - 1) * S, with room S for each rest."""

    tokens: jax.Array  # int32 [n, O]
    positions: jax.Array  # int32 [n, O]
    lead: jax.Array  # bool [n, T, T]  which tokens of the lead (last) each of its tokens sees
    rest: jax.Array  # bool [n * (u - 1), S, T + S]  which of the lead's and its own the rests' see
    places: jax.Array  # int32 [n, u * T]  index in its unit of each token of the rows


def shared(tokens: jax.Array, attention: jax.Array, unit: int) -> jax.Array:
    """How many tokens each row begins with like the first of its unit; int32 [n, u].

    tokens int32, attention bool [n * u, T]. A lead shares its whole length.
    """
    rows, real = (x.reshape(-1, unit, x.shape[-1]) for x in (tokens, attention))
    same = (rows == rows[:, :1]) & real & real[:, :1]
    return jnp.cumprod(same, axis=-1, dtype=jnp.int32).sum(-1)


def rest(tokens: jax.Array, attention: jax.Array, lengths: jax.Array, unit: int) -> jax.Array:
    """Columns that rows need after what they share, for their first `lengths`; int32 [n * u]."""
    common = shared(tokens, attention, unit)
    needed = jnp.maximum(lengths.reshape(-1, unit) - common, 0)
    return needed.at[:, 0].set(0).reshape(-1)


def pack(tokens: jax.Array, attention: jax.Array, *, unit: int, room: int) -> Packed:
    """Units of rows int32 and bool [n * u, T] with room for the rest of each row but the leads.

    Tokens beyond the room are left out, and their places mean nothing.
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

    begins = jnp.broadcast_to((column[None, None] < common)[:, :, None], (*after.shape, length))
    causal = (place[:, None] >= place[None])[None, None]
    own = causal & (of_rest(real) & (after < length))[:, :, None]
    rest = jnp.concatenate([begins, own], axis=-1).reshape(-1, room, length + room)
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
    """Final hidden states [B, T, D] of rows of which each `unit` side by side may begin alike.

    As config.forward, of the first columns: those that a row shares with the first of its unit, and
    `room` more. What comes later is finite and means nothing. positions: 0, 1, ... in each row.
    """
    del positions
    packed = pack(tokens, attention_mask, unit=unit, room=room)
    arrays = packed.tokens, packed.positions, packed.lead, packed.rest
    hidden = config.forward_units(params, *arrays, row_sharding=row_sharding)
    states = jnp.take_along_axis(hidden, packed.places[:, :, None], axis=1)
    return states.reshape(*tokens.shape, -1)
