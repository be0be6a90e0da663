"""What the policy sees of an episode: the whole conversation, or only its last turns.

With a window of w turns, turn k is answered after the common prefix and turns k-w+1 .. k, as if
the earlier ones had never been (RAGEN's limited_multi_turn; w = 1: no history). An episode of K
turns is then K samples. split_turns makes them out of arrays in the layout of a rollout [B, T],
each with the tokens that the policy saw and with one trained answer; put_back is the way back.
Advantages are computed in the layout of the rollout, so credit still runs over the whole episode.
Episodes of several conversations (Branches) are samples in the same way, one for each. Of an agent
that writes (text.agents) the last plan or reflection before a turn is kept in view:
where it is older than the window, it is put between the prefix and the window's first turn.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.text import agents
from agentrl_jax.types import Batch, Rollout


@struct.dataclass
class Windows:
    """Where the tokens of each sample, of a turn or of a branch, are in the rows of a rollout."""

    index: jax.Array  # int32 [B, K, W]  position in the episode's row; T = nothing
    own: jax.Array  # bool [B, K, W]   tokens of the turn, or branch, itself


def branch_of(turn: jax.Array, branch: jax.Array, xp: Any = jnp) -> jax.Array:
    """Conversation of each token, int32 [B, T], -1 = padding; turn [B, T], branch [B, K]."""
    return xp.where(turn >= 0, xp.take_along_axis(branch, xp.maximum(turn, 0), axis=1), -1)


@dataclasses.dataclass(frozen=True)
class Branches:
    """Episodes that hold several conversations: a sample for each of them (Rollout.branch)."""

    count: int  # of an episode, at most
    prefix: int  # tokens in front of each
    width: int = 0  # tokens of each, at most; 0 = as many as of an episode

    def rows(self, turns: int) -> int:
        """Samples of an episode."""
        del turns
        return self.count

    def turns_of_row(self, turns: int) -> int:
        """Turns of a sample, at most."""
        return turns

    def windows(self, rollout: Rollout) -> Windows:
        """The samples of a rollout; empty for conversations that were not begun."""
        length = rollout.tokens.shape[1]
        branch = branch_of(rollout.turn, rollout.branch)[:, None]
        place = jnp.arange(length)[None, None]
        of = jnp.arange(self.count)[None, :, None]
        own = (branch == of) & (place >= self.prefix)
        seen = own.any(-1, keepdims=True) & (own | (place < self.prefix))
        index = jnp.sort(jnp.where(seen, place, length), axis=-1)
        index = index[..., : self.width or length]
        own = jnp.take_along_axis(own, jnp.minimum(index, length - 1), axis=-1)
        return Windows(index=index, own=own & (index < length))


@dataclasses.dataclass(frozen=True)
class Context:
    """How many turns the policy sees, and the longest that texts of its task can be, in tokens."""

    window: int  # turns, the current one included; 0 = the whole conversation
    prefix: int  # in front of every first observation
    width: int  # the longest prompt of one turn
    max_response: int
    keeps: bool  # a written turn may precede the window

    @classmethod
    def of(cls, task: Any, window: int, max_response: int) -> 'Context':
        return cls(window, task.prefix.shape[0], task.width, max_response, task.agent.writes)

    def rows(self, turns: int) -> int:
        """Samples of an episode."""
        return turns

    def turns_of_row(self, turns: int) -> int:
        """Turns of a sample, at most, that train."""
        del turns
        return 1

    def windows(self, rollout: Rollout) -> Windows:
        """The samples of a rollout: K for each episode, empty for turns that were not played."""
        length, begin, prefix = rollout.tokens.shape[1], rollout.begin, self.prefix
        end = turn_ends(rollout.turn, begin.shape[1])
        turns = jnp.arange(begin.shape[1])
        first = jnp.maximum(turns - self.window + 1, 0)
        column = jnp.arange(min(prefix + self.block + self.max_response, length))
        place = (column - prefix)[None, None]
        position = begin[:, first][:, :, None] + place
        if self.keeps:
            every = (*begin.shape, begin.shape[1])
            rows = (jnp.broadcast_to(x[:, None], every) for x in (rollout.part, begin))
            start, more = (x[:, :, None] for x in kept(*rows, first[None], turns[None]))
            position = jnp.where(place < more, start + place, position - more)
        index = jnp.where(column < prefix, column[None, None], position)
        turns = turns[None]
        played = (turns < rollout.num_turns[:, None])[:, :, None]
        index = jnp.where(played & (index < end[:, :, None]), index, length)
        own = take(rollout.turn, index, fill=-1) == turns[:, :, None]
        return Windows(index=index, own=own & (column >= prefix)[None, None])

    @property
    def block(self) -> int:
        """The longest prompt of a turn after the prefix, earlier turns included."""
        return self.width + (self.window - 1 + self.keeps) * (self.width + self.max_response)

    def cache_tokens(self, max_tokens: int) -> int:
        """Positions that a row of the cache needs."""
        if not self.window:
            return max_tokens
        return min(max_tokens, self.prefix + self.block + self.max_response)


def kept(
    part: jax.Array, begin: jax.Array, first: jax.Array, turn: jax.Array, xp: Any = jnp
) -> tuple[jax.Array, jax.Array]:
    """(start, length) in its row of the last written turn before `turn`; length 0: none.

    None either where the window, which begins with turn `first`, holds it. part, begin int32
    [..., K]; first, turn int32 [...]. Up to where the next turn begins, so that what opens a
    message follows it as it follows the prefix.
    """
    index = xp.arange(part.shape[-1]).reshape((1,) * (part.ndim - 1) + (-1,))
    written = (part != agents.ACT) & (index < turn[..., None])
    last = xp.max(xp.where(written, index, -1), axis=-1, keepdims=True)
    start = xp.take_along_axis(begin, xp.maximum(last, 0), axis=-1)
    end = xp.take_along_axis(begin, xp.maximum(last + 1, 0), axis=-1)
    older = (last >= 0) & (last < first[..., None])
    return start[..., 0], xp.where(older, end - start, 0)[..., 0]


def turn_ends(turn: jax.Array, turns: int, xp: Any = jnp) -> jax.Array:
    """One past the last token so far of each turn, int32 [B, K]; turn int32 [B, T]."""
    count = xp.sum(turn[:, :, None] == xp.arange(turns)[None, None], axis=1)
    return xp.cumsum(count, axis=1)


def read_again(
    out: Rollout,
    episode: jax.Array,
    turn: jax.Array,
    context: Context,
    *,
    pad_id: int,
    xp: Any = jnp,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is read after the prefix to answer `turn` int32 [w] of `episode` int32 [w]; E = none.

    Returns (tokens int32 [w, W], position of the first one int32 [w], count int32 [w]).
    xp: jax.numpy, or numpy for a record on a host.
    """
    row = xp.minimum(episode, out.tokens.shape[0] - 1)
    end = turn_ends(out.turn[row], out.begin.shape[1], xp)
    first = xp.maximum(turn - context.window + 1, 0)
    begin = xp.take_along_axis(out.begin[row], first[:, None], axis=1)
    end = xp.take_along_axis(end, turn[:, None], axis=1)
    column = xp.arange(context.block)[None]
    position, more = begin + column, 0
    if context.keeps:
        found = kept(out.part[row], out.begin[row], first, turn, xp)
        start, more = (x[:, None] for x in found)
        position = xp.where(column < more, start + column, begin + column - more)
    tokens = xp.take_along_axis(
        out.tokens[row], xp.minimum(position, out.tokens.shape[1] - 1), axis=1
    )
    count = xp.where(episode < out.tokens.shape[0], (more + end - begin)[:, 0], 0)
    start = xp.full_like(count, context.prefix)
    return xp.where(position < end, tokens, pad_id), start, count


def take(x: jax.Array, index: jax.Array, fill: Any = 0) -> jax.Array:
    """x [B, T, ...] at index int32 [B, K, W]: [B, K, W, ...], `fill` where the index is T."""
    rows = jnp.arange(x.shape[0])[:, None, None]
    return jnp.asarray(x).at[rows, index].get(mode='fill', fill_value=fill)


def split_turns(x: Any, found: Windows) -> Any:
    """Every array [B, T, ...] of a tree as [B * K, W, ...]: one row for each turn."""

    def one(a):
        return take(a, found.index).reshape(-1, found.index.shape[2], *a.shape[2:])

    return jax.tree.map(one, x)


def of_episode(x: jax.Array, found: Windows) -> jax.Array:
    """What an episode has once, [B, ...], for each of its samples: [B * K, ...]."""
    return jnp.repeat(x, found.index.shape[1], axis=0)


def own_rows(mask: jax.Array, found: Windows) -> jax.Array:
    """A mask bool [B, T] as [B * K, W], only where a token belongs to the sample's own turn."""
    return split_turns(mask, found) & found.own.reshape(-1, found.own.shape[2])


def split_batch(batch: Batch, found: Windows) -> Batch:
    """The batch as one row for each turn, in which only that turn's tokens are trained."""
    masks = {name: own_rows(getattr(batch, name), found) for name in ('mask', 'value_mask')}

    def split(x):
        return own_rows(x, found) if x.dtype == bool else of_episode(x, found)

    extra = jax.tree.map(split, batch.extra)
    return split_turns(batch.replace(extra={}), found).replace(**masks, extra=extra)


def put_back(x: jax.Array, found: Windows, length: int) -> jax.Array:
    """[B * K, W] of the samples to [B, T] of the rollout: each token as its own turn has it."""
    x = x.reshape(found.index.shape)
    index = jnp.where(found.own, found.index, length)
    rows = jnp.arange(index.shape[0])[:, None, None]
    return jnp.zeros((index.shape[0], length), x.dtype).at[rows, index].set(x, mode='drop')
