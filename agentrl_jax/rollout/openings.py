"""Shared first observations: one member of a group reads them, the other members copy its cache.

Members of a group start in the same level, so their first observations are the same. Rows are only
appended to, so a slot that has read the observation holds its keys and values until its episode
ends. Other slots that start in the same level copy these and the final hidden state of the last
token. Slots compare tokens: if the observation differs, a slot reads its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.slots import Schedule, Slots, Turns
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes, Rollout


@struct.dataclass
class Openings:
    """The first observations of the episodes in S slots."""

    order: jax.Array  # int32 [E]  order in which the episodes are played
    length: jax.Array  # int32 [S]  tokens of the observation; 0 = none to copy
    hidden: jax.Array  # compute dtype [S, D]  final hidden state of its last token
    donor: jax.Array  # int32 [S]  slot whose row this one copies after the block is read; S = none


@dataclasses.dataclass(frozen=True)
class SharedPrompts(Schedule):
    """One slot reads the first observation of a group; the other slots copy its cache."""

    def start(
        self, task: text.TextTask, episodes: Episodes, rows: token_rows.Rows, world: text.Episode
    ) -> Openings:
        del task, world
        slots = rows.hidden.shape[0]
        return Openings(
            order=readers_first(episodes.level, slots),
            length=jnp.zeros(slots, jnp.int32),
            hidden=rows.hidden,
            donor=jnp.full(slots, slots, jnp.int32),
        )

    def order(self, slots: Slots, number: jax.Array) -> jax.Array:
        order = slots.schedule.order
        return order[jnp.minimum(number, order.shape[0] - 1)]

    def seat(
        self, slots: Slots, task: text.TextTask, which: jax.Array, turns: Turns
    ) -> tuple[Slots, jax.Array]:
        openings, none = slots.schedule, slots.phase.shape[0]
        changed = turns.episode != slots.episode[which]
        is_start = (turns.episode < slots.out.tokens.shape[0]) & (turns.world.turn == 0)
        over = jnp.where(changed, which, none)
        length = openings.length.at[over].set(0, mode='drop')
        episode = slots.episode.at[which].set(turns.episode, mode='drop')
        prefix = task.prefix.shape[0]
        prompts = turns.tokens, turns.count
        donor, follows = donors(length, slots.out, episode, which, prompts, prefix=prefix)
        follows &= is_start
        length = length.at[over].set(jnp.where(is_start, turns.count, 0), mode='drop')
        to = jnp.where(follows, which, none)
        donor = jnp.full_like(length, none).at[to].set(donor, mode='drop')
        openings = openings.replace(length=length, donor=donor)
        return slots.replace(episode=episode, schedule=openings), follows

    def after_read(self, slots: Slots, task: text.TextTask, which: jax.Array) -> Slots:
        openings, rows, none = slots.schedule, slots.rows, slots.phase.shape[0]
        prefix = task.prefix.shape[0]
        end = prefix + openings.length
        has_read = (jnp.arange(none)[:, None] == which[None]).any(1) & (rows.context == end)
        hidden = jnp.where(has_read[:, None], rows.hidden, openings.hidden)
        follows, donor = openings.donor < none, jnp.minimum(openings.donor, none - 1)
        (to,) = jnp.nonzero(follows, size=none, fill_value=0)
        copied = token_rows.copy(rows, donor[to], to, follows.sum(), begin=prefix, size=task.width)
        hidden = jnp.where(follows[:, None], hidden[donor], hidden)
        rows = copied.replace(
            hidden=jnp.where(follows[:, None], hidden, rows.hidden),
            context=jnp.where(follows, end, rows.context),
        )
        return slots.replace(rows=rows, schedule=openings.replace(hidden=hidden))


def readers_first(level: jax.Array, slots: int) -> jax.Array:
    """Return an order of the episodes int32 [E]: the first of each group first, per `slots`.

    Blocks are then filled with slots that have to read their prompts.
    """
    place = jnp.arange(level.shape[0])
    other = (place % slots > 0) & (level == jnp.roll(level, 1))
    return jnp.argsort(2 * (place // slots) + other, stable=True).astype(jnp.int32)


def donors(
    length: jax.Array,
    out: Rollout,
    episode: jax.Array,
    which: jax.Array,
    prompt: tuple[jax.Array, jax.Array],
    *,
    prefix: int,
) -> tuple[jax.Array, jax.Array]:
    """Find slots that have read the same prompt: (donor int32 [w], bool [w] if there is one).

    length int32 [S]: Openings.length. episode int32 [S]: rows of out. prompt: next prompts of slots
    `which` int32 [w], (tokens int32 [w, width], count int32 [w]).
    """
    tokens, count = prompt
    slots, rows = length.shape[0], out.tokens.shape[0]
    level = out.level[jnp.minimum(episode, out.level.shape[0] - 1)][None]
    same = level == level[0, jnp.minimum(which, slots - 1)][:, None]
    same &= (length[None] == count[:, None]) & (count > 0)[:, None]
    donor = jnp.argmax(same, axis=1)
    column = jnp.arange(tokens.shape[1])[None]
    row = jnp.minimum(episode[donor], rows - 1)[:, None]
    equal = (out.tokens[row, prefix + column] == tokens) | (column >= count[:, None])
    return donor, same.any(axis=1) & equal.all(axis=1)
