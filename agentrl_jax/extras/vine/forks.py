"""Continuations: a finished episode is rewound to the start of earlier turns and continued.

Cache rows are append-only, and an entry is visible to later positions only. The state at the start
of turn k is therefore the first length_k entries of the row and the environment state at that time;
no part of the cache has to be saved. The slot of a finished episode (the trunk) returns to turn k.
The normal path of a turn then prefills its prompt again and overwrites the old entries.

Turns are played in descending order. A continuation from turn k overwrites nothing before length_k,
so the prefix of the next continuation, from turn k or an earlier one, is still intact. For the same
reason an idle slot may copy the row at any time and play the next continuation.
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
    """F continuations of each episode, each from the start of one of its turns.

    They are separate from episodes: metrics, filters and reports of a rollout ignore them.
    """

    turn: jax.Array  # int32 [B, F]  first turn of the continuation; 0 = not played
    rollout: Rollout  # [B, F, ...]  tokens before that turn are attended to, but are not sampled
    # and have no rewards: returns are from that turn on; turns keep their numbers


def with_continuations(rollout: Rollout) -> Rollout:
    """Return each episode followed by its continuations, [B (1 + F), ...]."""

    def join(trunk, forked):
        rows = jnp.concatenate([trunk[:, None], forked], axis=1)
        return rows.reshape(-1, *trunk.shape[1:])

    extra = dict(rollout.extra)
    forked = extra.pop(CONTINUATIONS).rollout
    return jax.tree.map(join, rollout.replace(extra=extra), forked)


@struct.dataclass
class ForkState:
    """Turn starts of the trunks in S slots, K per trunk, and their pending continuations."""

    world: text.Episode  # [S, K, ...]  the environment at the start of the turn
    length: jax.Array  # int32 [S, K]  tokens before the turn's prompt
    sampled_end: jax.Array  # bool [S, K]  the previous turn ended with an end token
    pending: jax.Array  # bool [S, F]  continuations of the slot's trunk that no slot has started
    turn: jax.Array | None = None  # int32 [E, F]  as Forks.turn, 0 until the trunk has ended; None
    # if the turns are known in advance (not Forks.unsure)


@struct.dataclass
class ForkAssignment:
    """Continuations that w slots start."""

    begins: jax.Array  # bool [w]  whether the slot starts a continuation
    source: jax.Array  # int32 [w]  slot of the trunk: this slot, or one that it copies
    number: jax.Array  # int32 [w]  index among the continuations of the trunk, in [0, F)


def empty_bank(world: text.Episode, forks: Forks, turns: int) -> ForkState:
    """Return a bank without turn starts; world: of S slots."""
    slots = jax.tree.leaves(world)[0].shape[0]
    grid = (slots, turns)
    return ForkState(
        world=jax.tree.map(lambda x: jnp.zeros((*grid, *x.shape[1:]), x.dtype), world),
        length=jnp.zeros(grid, jnp.int32),
        sampled_end=jnp.zeros(grid, bool),
        pending=jnp.zeros((slots, forks.turn.shape[1]), bool),
        turn=jnp.zeros_like(forks.turn) if forks.unsure else None,
    )


def turns(bank: ForkState, forks: Forks) -> jax.Array:
    """Return the first turn of each continuation; int32 [E, F]."""
    return forks.turn if bank.turn is None else bank.turn


def unsure_turn(out: Rollout, row: jax.Array, played: jax.Array) -> jax.Array:
    """Return the turn after the first with the largest mean of -log p; int32 [w].

    row, played int32 [w]: finished episodes and their number of turns. 0 for episodes of one turn.
    Means exclude tokens that were forced by a grammar.
    """
    sampled, count = out.action_mask[row], out.begin.shape[1]
    if out.allowed is not None:
        sampled &= jax.lax.population_count(out.allowed[row]).sum(-1) > 1
    at = jnp.arange(row.shape[0])[:, None], jnp.where(sampled, out.turn[row], count)

    def summed(x):
        return jnp.zeros((row.shape[0], count)).at[at].add(x, mode='drop')

    surprise = summed(jnp.where(sampled, -out.logprobs[row], 0.0)) / jnp.maximum(summed(sampled), 1)
    k = jnp.arange(count)[None]
    later = (k > 0) & (k < played[:, None])
    return jnp.argmax(jnp.where(later, surprise, -1.0), axis=1) * later.any(1)


def trunk_of(row: jax.Array, forks: Forks) -> jax.Array:
    """Return the trunk of a row of the listed episodes; a trunk is its own."""
    trunks, count = forks.turn.shape
    return jnp.where(row < trunks, row, (row - trunks) // count)


def remember(
    bank: ForkState, rows: jax.Array, world: text.Episode, length: jax.Array, sampled_end: jax.Array
) -> ForkState:
    """Record the start of the next turn of the slots `rows` int32 [w].

    Continuations are recorded too, but only at turns that no pending continuation starts from.
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
    bank: ForkState,
    forks: Forks,
    rows: jax.Array,
    episode: jax.Array,
    over: jax.Array,
    played: jax.Array,
    out: Rollout,
) -> ForkState:
    """Mark the continuations of finished trunks as pending, for turns that the trunk reached.

    episode int32 [w]: rows of out that the slots played; played int32 [w]: their number of turns.
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


def has_own_forks(bank: ForkState, rows: jax.Array) -> jax.Array:
    """Return whether the trunk of each slot has pending continuations; bool [w]."""
    return bank.pending.at[rows].get(mode='fill', fill_value=False).any(1)


def assign(bank: ForkState, rows: jax.Array, free: jax.Array) -> tuple[ForkState, ForkAssignment]:
    """Assign free slots the next continuation of their trunk or, without one, of another slot."""
    slots, count = bank.pending.shape
    serves = free & has_own_forks(bank, rows)
    mine = jnp.argmax(bank.pending[jnp.minimum(rows, slots - 1)], axis=1)
    pending = bank.pending.at[jnp.where(serves, rows, slots), mine].set(False, mode='drop')
    helps = free & ~serves & (rows < slots)
    (remaining,) = jnp.nonzero(pending.reshape(-1), size=rows.shape[0], fill_value=slots * count)
    item = remaining[jnp.maximum(jnp.cumsum(helps) - 1, 0)]
    helps &= item < slots * count
    at = jnp.where(helps, item, slots * count)
    pending = pending.reshape(-1).at[at].set(False, mode='drop').reshape(slots, count)
    work = ForkAssignment(
        begins=serves | helps,
        source=jnp.where(helps, item // count, jnp.minimum(rows, slots - 1)),
        number=jnp.where(helps, item % count, mine),
    )
    return bank.replace(pending=pending), work


def copy_caches(
    cache_rows: token_rows.Rows, rows: jax.Array, work: ForkAssignment
) -> token_rows.Rows:
    """Copy caches to the slots that continue the trunk of another slot."""
    helps = work.begins & (work.source != rows)
    (which,) = jnp.nonzero(helps, size=rows.shape[0], fill_value=0)
    return token_rows.copy(cache_rows, work.source[which], rows[which], helps.sum())


def copy_prefix(
    out: Rollout, row: jax.Array, trunk: jax.Array, turn: jax.Array, length: jax.Array
) -> Rollout:
    """Copy the part of the trunk before `turn` to the row of its continuation; int32 [w].

    Row N copies nothing. The copied fields (tokens, attention_mask, turn, begin, part, trial) are
    attended to and never trained.
    """
    before = jnp.arange(out.tokens.shape[1])[None] < length[:, None]
    tokens = jnp.where(before, out.tokens[trunk], out.tokens.at[row].get(mode='clip'))
    earlier = jnp.arange(out.begin.shape[1])[None] < turn[:, None]

    def first(x):
        return x.at[row].set(jnp.where(earlier, x[trunk], 0), mode='drop')

    return out.replace(
        tokens=out.tokens.at[row].set(tokens, mode='drop'),
        attention_mask=out.attention_mask.at[row].set(before, mode='drop'),
        turn=out.turn.at[row].set(jnp.where(before, out.turn[trunk], -1), mode='drop'),
        begin=first(out.begin),
        part=first(out.part),
        trial=first(out.trial),
    )


def begin(
    bank: ForkState,
    out: Rollout,
    episode: jax.Array,
    forks: Forks,
    rows: jax.Array,
    free: jax.Array,
) -> tuple[ForkState, ForkAssignment, Rollout, Turns]:
    """Start continuations in the free slots among `rows` int32 [w].

    episode int32 [S]: the row of out that each slot played last. Returns (bank, work, out with the
    prefixes of the continuations, the turns to play where work.begins).
    """
    bank, work = assign(bank, rows, free)
    trunks, count = forks.turn.shape
    trunk = jnp.minimum(trunk_of(episode[work.source], forks), trunks - 1)
    turn = turns(bank, forks)[trunk, work.number]
    at = (work.source, turn)
    length, world = bank.length[at], jax.tree.map(lambda x: x[at], bank.world)
    row = trunks + trunk * count + work.number
    row = jnp.where(work.begins, row, out.tokens.shape[0])
    out = copy_prefix(out, row, trunk, turn, length)
    return bank, work, out, Turns(row, world, length, bank.sampled_end[at])


def split(out: Rollout, begun: jax.Array) -> Rollout:
    """Split the listed rows into trunks [E, ...] with continuations [E, F, ...].

    begun int32 [E, F]: the scheduled first turns of the continuations.
    """
    trunks = begun.shape[0]
    rollout = jax.tree.map(lambda x: x[trunks:].reshape(*begun.shape, *x.shape[1:]), out)
    turn = jnp.where(rollout.num_turns > 0, begun, 0)
    continuations = Continuations(turn=turn, rollout=rollout)
    trunk = jax.tree.map(lambda x: x[:trunks], out)
    return trunk.replace(extra=trunk.extra | {CONTINUATIONS: continuations})


@struct.dataclass
class State:
    """State of the schedule."""

    bank: ForkState
    inner: Any  # state of the inner schedule


@dataclasses.dataclass(frozen=True)
class Forked(Schedule):
    """A slot plays the continuations of its trunk before the next episode of the list.

    At the end of the list it plays continuations of other slots.
    """

    inner: Schedule  # schedule of the episodes
    copies: bool  # continuing the trunk of another slot requires a copy of its cache

    def within(self, slots: Slots) -> Slots:
        """Return the slots with the state of the inner schedule."""
        return slots.replace(schedule=slots.schedule.inner)

    def around(self, slots: Slots, bank: ForkState) -> Slots:
        """Return the slots of the inner schedule with the state of this one."""
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
        forks, episode = episodes.extra[FORKS], slots.episode[which]
        bank = finish(slots.schedule.bank, forks, which, episode, over, turns.world.turn, slots.out)
        free = over & ~has_own_forks(bank, which)
        slots, turns = super().next_turns(slots, task, episodes, which, free, turns)
        left = over & ~(free & (turns.episode < slots.out.tokens.shape[0]))
        bank, work, out, fork_turns = begin(bank, slots.out, slots.episode, forks, which, left)
        turns = choose(work.begins, fork_turns, turns)
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
