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

from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout.slots import IDLE, Schedule, Slots, Turns, choose
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes, Rollout

FIRST_FORKED = 2**30  # first stream of continuations, above the streams of all episodes
FORKS = 'forks'  # in Episodes.extra
CONTINUATIONS = 'continuations'  # in Rollout.extra


@struct.dataclass
class Forks:
    """F continuations of each of E episodes, in playing order."""

    turn: jax.Array  # int32 [E, F]  first turn of the continuation, never increasing along F
    stream: jax.Array  # int32 [E, F]  of tokens and environments: the episode's would replay it


def with_forks(episodes: Episodes, *, continuations: int, max_turns: int) -> Episodes:
    """Add `continuations` continuations from the start of each turn after the first.

    The last turn comes first. The first turn needs none: the other members of the group start there
    too.
    """
    turn = jnp.repeat(jnp.arange(max_turns - 1, 0, -1, dtype=jnp.int32), continuations)
    number = jnp.arange(len(turn), dtype=jnp.int32)[None]
    stream = FIRST_FORKED + episodes.token_stream[:, None] * len(turn) + number
    turn = jnp.broadcast_to(turn, stream.shape)
    return episodes.replace(extra={FORKS: Forks(turn, stream)})


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
    inner: Any  # state of Forked.inner


def remember(state: ForkState, rows: jax.Array, turns: Turns) -> ForkState:
    """Record the start of the next turn of the slots `rows` int32 [w].

    Continuations are recorded too, but only at turns that no pending continuation starts from.
    """

    def put(into, value):
        return into.at[rows, turns.world.turn].set(value, mode='drop')

    return state.replace(
        world=jax.tree.map(put, state.world, turns.world),
        length=put(state.length, turns.length),
        sampled_end=put(state.sampled_end, turns.sampled_end),
    )


def finish(
    state: ForkState,
    forks: Forks,
    rows: jax.Array,
    episode: jax.Array,
    over: jax.Array,
    played: jax.Array,
) -> ForkState:
    """Mark the continuations of finished trunks as pending, for turns that the trunk reached.

    episode int32 [w]: rows of Slots.out that the slots played; played int32 [w]: their turns.
    """
    trunks, slots = forks.turn.shape[0], state.pending.shape[0]
    reached = forks.turn[jnp.minimum(episode, trunks - 1)] < played[:, None]
    at = jnp.where(over & (episode < trunks), rows, slots)
    return state.replace(pending=state.pending.at[at].set(reached, mode='drop'))


def has_own_forks(pending: jax.Array, rows: jax.Array) -> jax.Array:
    """Return whether the trunk of each slot has pending continuations; bool [w]."""
    return pending.at[rows].get(mode='fill', fill_value=False).any(1)


def assign(
    pending: jax.Array, rows: jax.Array, free: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Assign free slots the next continuation of their trunk or, without one, of another slot.

    Returns (pending, bool [w]: the slot starts a continuation, int32 [w]: slot of its trunk,
    int32 [w]: number of the continuation in [0, F)).
    """
    slots, count = pending.shape
    serves = free & has_own_forks(pending, rows)
    mine = jnp.argmax(pending[jnp.minimum(rows, slots - 1)], axis=1)
    pending = pending.at[jnp.where(serves, rows, slots), mine].set(False, mode='drop')
    helps = free & ~serves & (rows < slots)
    (remaining,) = jnp.nonzero(pending.reshape(-1), size=rows.shape[0], fill_value=slots * count)
    item = remaining[jnp.maximum(jnp.cumsum(helps) - 1, 0)]
    helps &= item < slots * count
    at = jnp.where(helps, item, slots * count)
    pending = pending.reshape(-1).at[at].set(False, mode='drop').reshape(slots, count)
    source = jnp.where(helps, item // count, jnp.minimum(rows, slots - 1))
    return pending, serves | helps, source, jnp.where(helps, item % count, mine)


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
    state: ForkState, slots: Slots, forks: Forks, rows: jax.Array, free: jax.Array
) -> tuple[ForkState, Rollout, Turns, jax.Array]:
    """Start continuations in the free slots among `rows` int32 [w].

    Returns (state, Slots.out with the prefixes of the continuations, their turns, the slots of
    their trunks int32 [w]). Turns.episode is N in slots that start none.
    """
    pending, begins, source, number = assign(state.pending, rows, free)
    trunks, count = forks.turn.shape
    played = slots.episode[source]  # the trunk or one of its continuations
    trunk = jnp.where(played < trunks, played, (played - trunks) // count)
    trunk = jnp.minimum(trunk, trunks - 1)
    turn = forks.turn[trunk, number]
    at = (source, turn)
    length, world = state.length[at], jax.tree.map(lambda x: x[at], state.world)
    row = jnp.where(begins, trunks + trunk * count + number, slots.out.tokens.shape[0])
    out = copy_prefix(slots.out, row, trunk, turn, length)
    turns = Turns(row, world, length, state.sampled_end[at])
    return state.replace(pending=pending), out, turns, source


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

    def listed(self, episodes: Episodes) -> Episodes:
        """List the episodes, then their continuations trunk by trunk: E (1 + F) rows."""
        forks = episodes.extra[FORKS]

        def join(trunks, continuations):
            return jnp.concatenate([trunks, continuations.reshape(-1)])

        return Episodes(
            level=join(episodes.level, jnp.repeat(episodes.level, forks.turn.shape[1])),
            token_stream=join(episodes.token_stream, forks.stream),
            world_stream=join(episodes.world_stream, forks.stream),
        )

    def start(
        self, task: text.TextTask, episodes: Episodes, rows: token_rows.Rows, world: text.Episode
    ) -> ForkState:
        grid = (rows.hidden.shape[0], task.max_turns)
        return ForkState(
            world=jax.tree.map(lambda x: jnp.zeros((*grid, *x.shape[1:]), x.dtype), world),
            length=jnp.zeros(grid, jnp.int32),
            sampled_end=jnp.zeros(grid, bool),
            pending=jnp.zeros((grid[0], episodes.extra[FORKS].turn.shape[1]), bool),
            inner=self.inner.start(task, episodes, rows, world),
        )

    def served(self, slots: Slots, count: int) -> jax.Array:
        waiting, none = self.inner.served(self.within(slots), count), slots.phase.shape[0]
        (idle,) = jnp.nonzero(slots.phase == IDLE, size=count, fill_value=none)
        after = jnp.arange(count) - jnp.sum(waiting < none)
        return jnp.where(after < 0, waiting, idle[jnp.maximum(after, 0)])

    def waiting(self, slots: Slots) -> jax.Array:
        pending = jnp.sum(slots.schedule.pending)
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
        forks, none = episodes.extra[FORKS], slots.out.tokens.shape[0]
        state, episode = slots.schedule, slots.episode[which]
        state = finish(state, forks, which, episode, over, turns.world.turn)
        free = over & ~has_own_forks(state.pending, which)
        slots, turns = super().next_turns(slots, task, episodes, which, free, turns)
        left = over & ~(free & (turns.episode < none))
        state, out, fork_turns, source = begin(state, slots, forks, which, left)
        begins = fork_turns.episode < none
        turns = choose(begins, fork_turns, turns)
        at = jnp.where(turns.episode < none, which, slots.phase.shape[0])
        rows = slots.rows
        if self.copies:
            helps = begins & (source != which)
            (first,) = jnp.nonzero(helps, size=which.shape[0], fill_value=0)
            rows = token_rows.copy(rows, source[first], which[first], helps.sum())
        return slots.replace(schedule=remember(state, at, turns), out=out, rows=rows), turns

    def seat(
        self, slots: Slots, task: text.TextTask, which: jax.Array, turns: Turns
    ) -> tuple[Slots, jax.Array]:
        state = slots.schedule
        slots, follows = self.inner.seat(self.within(slots), task, which, turns)
        return slots.replace(schedule=state.replace(inner=slots.schedule)), follows

    def after_read(self, slots: Slots, task: text.TextTask, which: jax.Array) -> Slots:
        state = slots.schedule
        slots = self.inner.after_read(self.within(slots), task, which)
        return slots.replace(schedule=state.replace(inner=slots.schedule))

    def finish(self, slots: Slots, episodes: Episodes) -> Rollout:
        """Split the listed rows into trunks [E, ...] with continuations [E, F, ...]."""
        turn, out = episodes.extra[FORKS].turn, slots.out
        trunks = turn.shape[0]
        rollout = jax.tree.map(lambda x: x[trunks:].reshape(*turn.shape, *x.shape[1:]), out)
        turn = jnp.where(rollout.num_turns > 0, turn, 0)
        trunk = jax.tree.map(lambda x: x[:trunks], out)
        return trunk.replace(extra=trunk.extra | {CONTINUATIONS: Continuations(turn, rollout)})
