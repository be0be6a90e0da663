"""First observations: what the members of a group have in common is read by one, and copied.

Members of a group begin in the same level, so their worlds start with the same observation. The
row of a slot that has read it holds its keys and values while its episode lasts, for a row is only
appended to. Another slot that begins in that level copies them and the final hidden state of the
last token. Tokens decide: a slot whose world starts otherwise reads its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.slots import Schedule, Slots, Turns
from agentrl_jax.text import task as text
from agentrl_jax.types import Rollout


@struct.dataclass
class Openings:
    """The first observations of the episodes in S slots."""

    order: jax.Array  # int32 [E]  in which the episodes are played
    length: jax.Array  # int32 [S]  tokens of the observation; 0 = none that others may copy
    hidden: jax.Array  # compute dtype [S, D]  final hidden state of its last token
    donor: jax.Array  # int32 [S]  slot whose row this one copies after the block is read; S = none


@dataclasses.dataclass(frozen=True)
class SharedPrompts(Schedule):
    """One slot reads the first observation of a group, and the others copy it."""

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
        self,
        slots: Slots,
        task: text.TextTask,
        which: jax.Array,
        turns: Turns,
        prompt: tuple[jax.Array, jax.Array],
    ) -> tuple[Slots, jax.Array]:
        openings, none = slots.schedule, slots.phase.shape[0]
        changed = turns.episode != slots.episode[which]
        begins = (turns.episode < slots.out.tokens.shape[0]) & (turns.world.turn == 0)
        over = jnp.where(changed, which, none)
        length = openings.length.at[over].set(0, mode='drop')
        episode = slots.episode.at[which].set(turns.episode, mode='drop')
        prefix = task.prefix.shape[0]
        donor, follows = donors(length, slots.out, episode, which, prompt, prefix=prefix)
        follows &= begins
        length = length.at[over].set(jnp.where(begins, prompt[1], 0), mode='drop')
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
    """The episodes in the order of the list, but of every `slots` the first of each group first.

    Blocks that are read are then full of slots that have to read. int32 [E].
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
    """(donor int32 [w], bool [w] if there is one): slots that have read the prompts of others.

    length int32 [S]: as of Openings, of what has been read. episode int32 [S]: rows of out. prompt:
    what each of the slots `which` int32 [w] is to read, (tokens int32 [w, width], count int32 [w]).
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
