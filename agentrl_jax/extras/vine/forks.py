"""Continuations: an episode that has ended is rewound to the start of earlier turns and played on.

A row of the cache is only appended to, and an entry is visible only to later positions. So the
state at the start of turn k is the first length_k entries of the row and the world of that moment:
nothing of the cache has to be kept. The slot in which an episode (the trunk) was played goes back
to turn k, where the normal path of a turn reads its prompt again and overwrites what stood there.

Turns come in descending order: what was played from turn k has overwritten nothing before
length_k, so a later continuation, from k or an earlier turn, still finds its beginning. For the
same reason a slot without work may copy the row at any time and take over the next continuation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.extras.vine.draw import FORKS, Forks, listed
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.slots import IDLE, Schedule, Slots, Turns, choose
from agentrl_jax.text import task as text
from agentrl_jax.types import Rollout

CONTINUATIONS = 'continuations'  # in Rollout.extra


@struct.dataclass
class Continuations:
    """F times each episode was rewound to the start of one of its turns and played on.

    They are kept apart from episodes: whatever counts, filters or shows rows of a rollout ignores
    them.
    """

    turn: jax.Array  # int32 [B, F]  turn from whose start it was played; 0 = it was not
    rollout: Rollout  # [B, F, ...]  what precedes that turn is attended to, and none of it is
    # sampled or rewarded: returns are those from that turn on; turns keep their numbers


def with_continuations(rollout: Rollout) -> Rollout:
    """[B (1 + F), ...]: each episode, followed by its continuations."""

    def join(trunk, forked):
        rows = jnp.concatenate([trunk[:, None], forked], axis=1)
        return rows.reshape(-1, *trunk.shape[1:])

    extra = dict(rollout.extra)
    forked = extra.pop(CONTINUATIONS).rollout
    return jax.tree.map(join, rollout.replace(extra=extra), forked)


@struct.dataclass
class Bank:
    """What the S slots remember of the K turn starts of their trunk, and what is left to play."""

    world: text.Episode  # [S, K, ...]  the world at the start of the turn
    length: jax.Array  # int32 [S, K]  tokens in front of the turn's prompt
    sampled_end: jax.Array  # bool [S, K]  the turn before it ended itself
    pending: jax.Array  # bool [S, F]  continuations of the slot's trunk that nobody has begun
    turn: jax.Array | None = None  # int32 [E, F]  as Forks.turn, 0 until the trunk has ended; None
    # where it is known before (Forks.unsure)


@struct.dataclass
class Work:
    """Continuations that w slots begin."""

    begins: jax.Array  # bool [w]  whether the slot begins one
    source: jax.Array  # int32 [w]  slot whose trunk it continues: the same, or one it copies
    number: jax.Array  # int32 [w]  which of the trunk's continuations, in [0, F)


def empty_bank(world: text.Episode, forks: Forks, turns: int) -> Bank:
    """A bank that knows no turn yet; world: of S slots."""
    slots = jax.tree.leaves(world)[0].shape[0]
    grid = (slots, turns)
    return Bank(
        world=jax.tree.map(lambda x: jnp.zeros((*grid, *x.shape[1:]), x.dtype), world),
        length=jnp.zeros(grid, jnp.int32),
        sampled_end=jnp.zeros(grid, bool),
        pending=jnp.zeros((slots, forks.turn.shape[1]), bool),
        turn=jnp.zeros_like(forks.turn) if forks.unsure else None,
    )


def turns(bank: Bank, forks: Forks) -> jax.Array:
    """int32 [E, F]: the turn from whose start each continuation is played."""
    return forks.turn if bank.turn is None else bank.turn


def unsure_turn(out: Rollout, row: jax.Array, played: jax.Array) -> jax.Array:
    """The later turn whose tokens surprised the policy most, by the mean of -log p; int32 [w].

    row, played int32 [w]: episodes that have ended, and their turns; 0 where there was but one.
    Tokens that a grammar forced are in no mean.
    """
    said, count = out.action_mask[row], out.begin.shape[1]
    if out.allowed is not None:
        said &= jax.lax.population_count(out.allowed[row]).sum(-1) > 1
    at = jnp.arange(row.shape[0])[:, None], jnp.where(said, out.turn[row], count)

    def summed(x):
        return jnp.zeros((row.shape[0], count)).at[at].add(x, mode='drop')

    surprise = summed(jnp.where(said, -out.logprobs[row], 0.0)) / jnp.maximum(summed(said), 1)
    k = jnp.arange(count)[None]
    later = (k > 0) & (k < played[:, None])
    return jnp.argmax(jnp.where(later, surprise, -1.0), axis=1) * later.any(1)


def trunk_of(row: jax.Array, forks: Forks) -> jax.Array:
    """The episode that a row of the listed episodes is, or is a continuation of."""
    trunks, count = forks.turn.shape
    return jnp.where(row < trunks, row, (row - trunks) // count)


def remember(
    bank: Bank, rows: jax.Array, world: text.Episode, length: jax.Array, sampled_end: jax.Array
) -> Bank:
    """Writes down the turn that slots `rows` int32 [w] are about to begin.

    Continuations write too, at turns that nothing pending begins at any more.
    """
    at = (rows, world.turn)

    def put(into, value):
        return into.at[at].set(value, mode='drop')

    return bank.replace(
        world=jax.tree.map(put, bank.world, world),
        length=put(bank.length, length),
        sampled_end=put(bank.sampled_end, sampled_end),
    )


def finish(
    bank: Bank,
    forks: Forks,
    rows: jax.Array,
    episode: jax.Array,
    over: jax.Array,
    played: jax.Array,
    out: Rollout,
) -> Bank:
    """Where a trunk has ended, those of its continuations become pending whose turn it reached.

    episode int32 [w]: what the slots played, rows of out; played int32 [w]: its turns.
    """
    trunks = forks.turn.shape[0]
    ended, trunk = over & (episode < trunks), jnp.minimum(episode, trunks - 1)
    if bank.turn is None:
        turn = forks.turn[trunk]
    else:
        turn = unsure_turn(out, trunk, played)[:, None]
        turn = jnp.broadcast_to(turn, (len(trunk), forks.turn.shape[1])).astype(jnp.int32)
        at = jnp.where(ended, episode, trunks)
        bank = bank.replace(turn=bank.turn.at[at].set(turn, mode='drop'))
    pending = (turn > 0) & (turn < played[:, None])
    at = jnp.where(ended, rows, bank.pending.shape[0])
    return bank.replace(pending=bank.pending.at[at].set(pending, mode='drop'))


def own_work(bank: Bank, rows: jax.Array) -> jax.Array:
    """bool [w]: slots with pending continuations of their own trunk."""
    return bank.pending.at[rows].get(mode='fill', fill_value=False).any(1)


def assign(bank: Bank, rows: jax.Array, free: jax.Array) -> tuple[Bank, Work]:
    """Free slots begin their own next continuation or, without one, the next of another slot."""
    slots, count = bank.pending.shape
    own = free & own_work(bank, rows)
    mine = jnp.argmax(bank.pending[jnp.minimum(rows, slots - 1)], axis=1)
    pending = bank.pending.at[jnp.where(own, rows, slots), mine].set(False, mode='drop')
    helps = free & ~own & (rows < slots)
    (left,) = jnp.nonzero(pending.reshape(-1), size=rows.shape[0], fill_value=slots * count)
    item = left[jnp.maximum(jnp.cumsum(helps) - 1, 0)]
    helps &= item < slots * count
    at = jnp.where(helps, item, slots * count)
    pending = pending.reshape(-1).at[at].set(False, mode='drop').reshape(slots, count)
    work = Work(
        begins=own | helps,
        source=jnp.where(helps, item // count, jnp.minimum(rows, slots - 1)),
        number=jnp.where(helps, item % count, mine),
    )
    return bank.replace(pending=pending), work


def copy_caches(cache_rows: token_rows.Rows, rows: jax.Array, work: Work) -> token_rows.Rows:
    """Slots that help get the cache of the slot whose trunk they continue."""
    helps = work.begins & (work.source != rows)
    (which,) = jnp.nonzero(helps, size=rows.shape[0], fill_value=0)
    return token_rows.copy(cache_rows, work.source[which], rows[which], helps.sum())


def copy_beginning(
    out: Rollout, row: jax.Array, trunk: jax.Array, turn: jax.Array, length: jax.Array
) -> Rollout:
    """Copies what precedes `turn` in the trunk into its continuation's row; int32 [w], row N: none.

    Attended and never trained: tokens, attention_mask, turn, begin, part and trial.
    """
    before = jnp.arange(out.tokens.shape[1])[None] < length[:, None]
    tokens = jnp.where(before, out.tokens[trunk], out.tokens.at[row].get(mode='clip'))
    begun = jnp.arange(out.begin.shape[1])[None] < turn[:, None]

    def first(x):
        return x.at[row].set(jnp.where(begun, x[trunk], 0), mode='drop')

    return out.replace(
        tokens=out.tokens.at[row].set(tokens, mode='drop'),
        attention_mask=out.attention_mask.at[row].set(before, mode='drop'),
        turn=out.turn.at[row].set(jnp.where(before, out.turn[trunk], -1), mode='drop'),
        begin=first(out.begin),
        part=first(out.part),
        trial=first(out.trial),
    )


def begin(
    bank: Bank, out: Rollout, episode: jax.Array, forks: Forks, rows: jax.Array, free: jax.Array
) -> tuple[Bank, Work, Rollout, Turns]:
    """Gives continuations to the free ones of the slots `rows` int32 [w].

    episode int32 [S]: the row of out that each slot played last. Returns (bank, work, out with the
    continuations' beginnings, what is played where work.begins).
    """
    bank, work = assign(bank, rows, free)
    trunks, count = forks.turn.shape
    trunk = jnp.minimum(trunk_of(episode[work.source], forks), trunks - 1)
    turn = turns(bank, forks)[trunk, work.number]
    at = (work.source, turn)
    length, world = bank.length[at], jax.tree.map(lambda x: x[at], bank.world)
    row = trunks + trunk * count + work.number
    row = jnp.where(work.begins, row, out.tokens.shape[0])
    out = copy_beginning(out, row, trunk, turn, length)
    return bank, work, out, Turns(row, world, length, bank.sampled_end[at])


def split(out: Rollout, begun: jax.Array) -> Rollout:
    """The trunks int32 [E, ...] of the listed rows, with their continuations [E, F, ...].

    begun int32 [E, F]: the turns from which they were to be played.
    """
    trunks = begun.shape[0]
    rollout = jax.tree.map(lambda x: x[trunks:].reshape(*begun.shape, *x.shape[1:]), out)
    turn = jnp.where(rollout.num_turns > 0, begun, 0)
    continuations = Continuations(turn=turn, rollout=rollout)
    trunk = jax.tree.map(lambda x: x[:trunks], out)
    return trunk.replace(extra=trunk.extra | {CONTINUATIONS: continuations})


@struct.dataclass
class State:
    """What the schedule remembers."""

    bank: Bank
    inner: Any  # state of the schedule of the episodes


@dataclasses.dataclass(frozen=True)
class Forked(Schedule):
    """A slot plays the continuations of its trunk before the next episode of the list.

    Where the list is at its end it helps others.
    """

    inner: Schedule  # of the episodes
    copies: bool  # a slot that helps needs the cache of the slot it helps

    def within(self, slots: Slots) -> Slots:
        """The slots as the inner schedule knows them."""
        return slots.replace(schedule=slots.schedule.inner)

    def around(self, slots: Slots, bank: Bank) -> Slots:
        """The slots of the inner schedule as this one knows them."""
        return slots.replace(schedule=State(bank, slots.schedule))

    def listed(self, episodes: Episodes) -> Episodes:
        return listed(episodes)

    def start(
        self, task: text.TextTask, episodes: Episodes, rows: token_rows.Rows, world: text.Episode
    ) -> State:
        bank = empty_bank(world, episodes.extra[FORKS], task.max_turns)
        return State(bank, self.inner.start(task, episodes, rows, world))

    def served(self, slots: Slots, count: int) -> jax.Array:
        waiting, none = self.inner.served(self.within(slots), count), slots.phase.shape[0]
        (idle,) = jnp.nonzero(slots.phase == IDLE, size=count, fill_value=none)
        after = jnp.arange(count) - jnp.sum(waiting < none)
        return jnp.where(after < 0, waiting, idle[jnp.maximum(after, 0)])

    def waiting(self, slots: Slots) -> jax.Array:
        pending = jnp.sum(slots.schedule.bank.pending)
        helpers = jnp.minimum(jnp.sum(slots.phase == IDLE), pending)
        return self.inner.waiting(self.within(slots)) + helpers

    def order(self, slots: Slots, number: jax.Array) -> jax.Array:
        return self.inner.order(self.within(slots), number)

    def next_turns(
        self,
        slots: Slots,
        task: text.TextTask,
        episodes: Episodes,
        which: jax.Array,
        over: jax.Array,
        turns: Turns,
    ) -> tuple[Slots, Turns]:
        forks, played = episodes.extra[FORKS], slots.episode[which]
        bank = finish(slots.schedule.bank, forks, which, played, over, turns.world.turn, slots.out)
        free = over & ~own_work(bank, which)
        slots, turns = super().next_turns(slots, task, episodes, which, free, turns)
        left = over & ~(free & (turns.episode < slots.out.tokens.shape[0]))
        bank, work, out, begun = begin(bank, slots.out, slots.episode, forks, which, left)
        turns = choose(work.begins, begun, turns)
        at = jnp.where(turns.episode < out.tokens.shape[0], which, slots.phase.shape[0])
        bank = remember(bank, at, turns.world, turns.length, turns.sampled_end)
        rows = copy_caches(slots.rows, which, work) if self.copies else slots.rows
        state = slots.schedule.replace(bank=bank)
        return slots.replace(schedule=state, out=out, rows=rows), turns

    def seat(
        self,
        slots: Slots,
        task: text.TextTask,
        which: jax.Array,
        turns: Turns,
        prompt: tuple[jax.Array, jax.Array],
    ) -> tuple[Slots, jax.Array]:
        bank = slots.schedule.bank
        slots, follows = self.inner.seat(self.within(slots), task, which, turns, prompt)
        return self.around(slots, bank), follows

    def after_read(self, slots: Slots, task: text.TextTask, which: jax.Array) -> Slots:
        bank = slots.schedule.bank
        return self.around(self.inner.after_read(self.within(slots), task, which), bank)

    def finish(self, slots: Slots, episodes: Episodes) -> Rollout:
        return split(slots.out, turns(slots.schedule.bank, episodes.extra[FORKS]))
