"""First observations: what the members of a group have in common is read by one, and copied.

Members of a group begin in the same level, so their worlds say the same at first. The slot that
reads it keeps the final hidden state of its last token, and its row of the cache holds the keys and
values for as long as its episode goes on, for a row is only appended to. A slot that begins an
episode looks for such a donor. It follows the donor until the observation has been read, takes over
both, and samples. Levels and lengths find a donor, and tokens decide: where they differ, as with
worlds that are drawn for each member, a slot reads its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.slots import GENERATING, Schedule, Slots, Turns
from agentrl_jax.text import task as text
from agentrl_jax.types import Rollout


@struct.dataclass
class Openings:
    """The first observations of the episodes in S slots."""

    order: jax.Array  # int32 [E]  in which the episodes are played
    length: jax.Array  # int32 [S]  tokens of the observation; 0 = none that others may copy
    hidden: jax.Array  # compute dtype [S, D]  final hidden state of its last token, once read
    donor: jax.Array  # int32 [S]  slot that reads it instead of this one; S = none


@dataclasses.dataclass(frozen=True)
class SharedPrompts(Schedule):
    """One slot reads the first observation of a group, and the others copy it."""

    def start(
        self, task: text.TextTask, episodes: Episodes, rows: token_rows.Rows, world: text.Episode
    ) -> Openings:
        del task, world
        return empty(episodes.level, rows.hidden)

    def order(self, slots: Slots, number: jax.Array) -> jax.Array:
        order = slots.schedule.order
        return order[jnp.minimum(number, order.shape[0] - 1)]

    def seat(
        self,
        slots: Slots,
        task: text.TextTask,
        which: jax.Array,
        turns: Turns,
        prompt: tuple[jax.Array, jax.Array],
    ) -> tuple[Slots, jax.Array]:
        changed = turns.episode != slots.episode[which]
        episode = slots.episode.at[which].set(turns.episode, mode='drop')
        begins = (turns.episode < slots.out.tokens.shape[0]) & (turns.world.turn == 0)
        openings, follows = begin(
            slots.schedule,
            slots.out,
            episode,
            which,
            changed=changed,
            begins=begins,
            prompt=prompt,
            prefix=task.prefix.shape[0],
        )
        return slots.replace(episode=episode, schedule=openings), follows

    def after_read(self, slots: Slots, task: text.TextTask, which: jax.Array) -> Slots:
        where = dict(prefix=task.prefix.shape[0], width=task.width)
        openings, rows, ready = hand_on(slots.schedule, slots.rows, which, **where)
        phase = jnp.where(ready, GENERATING, slots.phase)
        return slots.replace(schedule=openings, rows=rows, phase=phase)


def empty(level: jax.Array, hidden: jax.Array) -> Openings:
    """Slots without an episode; level int32 [E], hidden [S, D]: of the empty rows."""
    slots = hidden.shape[0]
    return Openings(
        order=readers_first(level, slots),
        length=jnp.zeros(slots, jnp.int32),
        hidden=hidden,
        donor=jnp.full(slots, slots, jnp.int32),
    )


def readers_first(level: jax.Array, slots: int) -> jax.Array:
    """The episodes in the order of the list, but of every `slots` the first of each group first.

    Blocks that are read are then full of slots that have to read. int32 [E].
    """
    place = jnp.arange(level.shape[0])
    other = (place % slots > 0) & (level == jnp.roll(level, 1))
    return jnp.argsort(2 * (place // slots) + other, stable=True).astype(jnp.int32)


def begin(
    openings: Openings,
    out: Rollout,
    episode: jax.Array,
    rows: jax.Array,
    *,
    changed: jax.Array,
    begins: jax.Array,
    prompt: tuple[jax.Array, jax.Array],
    prefix: int,
) -> tuple[Openings, jax.Array]:
    """Slots `rows` int32 [w] play other episodes where changed, from the beginning where begins.

    episode int32 [S]: rows of out, with these. prompt: what each of `rows` is to read, (tokens
    int32 [w, width], count int32 [w]). Returns (openings, follows bool [w]: another slot reads it).
    """
    tokens, count = prompt
    slots = openings.length.shape[0]
    at = jnp.where(changed, rows, slots)
    length = openings.length.at[at].set(jnp.where(begins, count, 0), mode='drop')
    # Of two that begin now the earlier one reads, if nobody has. Who follows is nobody's donor.
    block, none = jnp.arange(rows.shape[0])[:, None], rows.shape[0]
    now = jnp.full(slots, -1).at[jnp.where(begins, rows, slots)].set(block[:, 0], mode='drop')
    now, level = now[None], out.level[jnp.minimum(episode, out.level.shape[0] - 1)][None]
    alike = level == level[0, jnp.minimum(rows, slots - 1)][:, None]
    alike &= (length[None] == count[:, None]) & begins[:, None]
    alike &= (now >= 0) | (openings.donor[None] == slots)
    rank = jnp.where(now < 0, none + 1, jnp.where(now < block, none - now, 0))
    rank = jnp.where(alike, rank, 0)
    donor = jnp.argmax(rank, axis=1)
    column = jnp.arange(tokens.shape[1])[None]
    row = jnp.minimum(episode[donor], out.tokens.shape[0] - 1)[:, None]
    same = (out.tokens[row, prefix + column] == tokens) | (column >= count[:, None])
    follows = (rank.max(axis=1) > 0) & same.all(axis=1)
    donor = openings.donor.at[rows].set(jnp.where(follows, donor, slots), mode='drop')
    return openings.replace(length=length, donor=donor), follows


def hand_on(
    openings: Openings, rows: token_rows.Rows, read: jax.Array, *, prefix: int, width: int
) -> tuple[Openings, token_rows.Rows, jax.Array]:
    """Slots `read` int32 [w] have read; what they read at first goes to those that follow them.

    Returns (openings, rows, ready bool [S]: slots that followed and can sample).
    """
    slots = openings.length.shape[0]
    end = prefix + openings.length
    at = jnp.where((rows.context == end).at[read].get(mode='clip'), read, slots)
    hidden = openings.hidden.at[at].set(rows.hidden.at[read].get(mode='clip'), mode='drop')
    donor = jnp.minimum(openings.donor, slots - 1)
    ready = (openings.donor < slots) & (rows.context[donor] >= end[donor])
    (to,) = jnp.nonzero(ready, size=slots, fill_value=0)
    rows = token_rows.copy(rows, donor[to], to, ready.sum(), begin=prefix, size=width)
    theirs = hidden[donor]
    rows = rows.replace(
        hidden=jnp.where(ready[:, None], theirs, rows.hidden),
        context=jnp.where(ready, end, rows.context),
    )
    openings = openings.replace(
        hidden=jnp.where(ready[:, None], theirs, hidden),
        donor=jnp.where(ready, slots, openings.donor),
    )
    return openings, rows, ready
