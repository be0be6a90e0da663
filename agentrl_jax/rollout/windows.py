"""Context windows: limit the policy's context to the last turns of an episode.

With a window of w turns, the context of turn k is the common prefix and turns k-w+1 .. k (RAGEN's
limited_multi_turn; w = 1: no history). An episode of K turns then becomes K samples. split_turns
creates them from arrays in the rollout layout [B, T]: each sample has the tokens in the policy's
context and one trained answer. scatter_back is the inverse. Advantages are computed in the rollout
layout, so credit still spans the full episode. Episodes with several conversations
(ConversationSpec) are split in the same way, into one sample per conversation. For agents that
write plans or reflections (text.agents), the last one before a turn stays in the context. If it is
older than the window, it is inserted between the prefix and the first turn of the window.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.text import agents
from agentrl_jax.types import Batch, Rollout


@struct.dataclass
class WindowIndex:
    """Index from samples, one per turn or branch, into the rows of a rollout."""

    index: jax.Array  # int32 [B, K, W]  position in the episode's row; T = none
    own: jax.Array  # bool [B, K, W]   tokens of the turn or branch itself


def branch_of(turn: jax.Array, branch: jax.Array, xp: Any = jnp) -> jax.Array:
    """Return each token's conversation int32 [B, T], -1 = padding; turn [B, T], branch [B, K]."""
    return xp.where(turn >= 0, xp.take_along_axis(branch, xp.maximum(turn, 0), axis=1), -1)


@dataclasses.dataclass(frozen=True)
class ConversationSpec:
    """Episodes with several conversations, with one sample each (Rollout.branch)."""

    count: int  # maximum number per episode
    prefix: int  # tokens in front of each
    width: int = 0  # maximum number of tokens of each; 0 = the episode's

    def rows(self, turns: int) -> int:
        """Return the number of samples per episode."""
        del turns
        return self.count

    def turns_of_row(self, turns: int) -> int:
        """Return the maximum number of turns per sample."""
        return turns

    def windows(self, rollout: Rollout) -> WindowIndex:
        """Return the samples of a rollout; conversations that never started are empty."""
        length = rollout.tokens.shape[1]
        branch = branch_of(rollout.turn, rollout.branch)[:, None]
        place = jnp.arange(length)[None, None]
        branches = jnp.arange(self.count)[None, :, None]
        in_branch = (branch == branches) & (place >= self.prefix)
        visible = in_branch.any(-1, keepdims=True) & (in_branch | (place < self.prefix))
        index = jnp.sort(jnp.where(visible, place, length), axis=-1)
        index = index[..., : self.width or length]
        in_branch = jnp.take_along_axis(in_branch, jnp.minimum(index, length - 1), axis=-1)
        return WindowIndex(index=index, own=in_branch & (index < length))


@dataclasses.dataclass(frozen=True)
class Context:
    """The window of a policy, and the maximum lengths of its task's texts, in tokens."""

    window: int  # turns, including the current one; 0 = the full conversation
    prefix: int  # in front of every first observation
    width: int  # the longest prompt of one turn
    max_response: int
    keeps: bool  # whether a written turn may precede the window

    @classmethod
    def of(cls, task: Any, window: int, max_response: int) -> 'Context':
        return cls(window, task.prefix.shape[0], task.width, max_response, task.agent.writes)

    def rows(self, turns: int) -> int:
        """Return the number of samples per episode."""
        return turns

    def turns_of_row(self, turns: int) -> int:
        """Return the maximum number of trained turns per sample."""
        del turns
        return 1

    def windows(self, rollout: Rollout) -> WindowIndex:
        """Return the samples of a rollout: K per episode, empty for unplayed turns."""
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
        turn_mask = (turns < rollout.num_turns[:, None])[:, :, None]
        index = jnp.where(turn_mask & (index < end[:, :, None]), index, length)
        in_turn = take(rollout.turn, index, fill=-1) == turns[:, :, None]
        return WindowIndex(index=index, own=in_turn & (column >= prefix)[None, None])

    @property
    def block(self) -> int:
        """Longest prompt of a turn after the prefix, including earlier turns."""
        return self.width + (self.window - 1 + self.keeps) * (self.width + self.max_response)

    def cache_tokens(self, max_tokens: int) -> int:
        """Return the number of cache positions that a row needs."""
        if not self.window:
            return max_tokens
        return min(max_tokens, self.prefix + self.block + self.max_response)


def kept(
    part: jax.Array, begin: jax.Array, first: jax.Array, turn: jax.Array, xp: Any = jnp
) -> tuple[jax.Array, jax.Array]:
    """Return (start, length) in its row of the last written turn before `turn`.

    The length is 0 if there is no such turn, or if the window, which starts with turn `first`,
    contains it. It extends to the start of the next turn, so that a message header follows it as it
    follows the prefix. part, begin int32 [..., K]; first, turn int32 [...].
    """
    index = xp.arange(part.shape[-1]).reshape((1,) * (part.ndim - 1) + (-1,))
    written = (part != agents.ACT) & (index < turn[..., None])
    last = xp.max(xp.where(written, index, -1), axis=-1, keepdims=True)
    start = xp.take_along_axis(begin, xp.maximum(last, 0), axis=-1)
    end = xp.take_along_axis(begin, xp.maximum(last + 1, 0), axis=-1)
    older = (last >= 0) & (last < first[..., None])
    return start[..., 0], xp.where(older, end - start, 0)[..., 0]


def turn_ends(turn: jax.Array, turns: int, xp: Any = jnp) -> jax.Array:
    """Return the end position of each turn so far, int32 [B, K]; turn int32 [B, T]."""
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
    """Return the tokens to read after the prefix before answering a turn.

    turn, episode int32 [w]; episode E = none. Returns (tokens int32 [w, W], position of the first
    one int32 [w], count int32 [w]). xp: jax.numpy, or numpy for a record on a host.
    """
    row = xp.minimum(episode, out.tokens.shape[0] - 1)
    end = turn_ends(out.turn[row], out.begin.shape[1], xp)
    first = xp.maximum(turn - context.window + 1, 0)
    begin = xp.take_along_axis(out.begin[row], first[:, None], axis=1)
    end = xp.take_along_axis(end, turn[:, None], axis=1)
    column = xp.arange(context.block)[None]
    position, more = begin + column, 0
    if context.keeps:
        span = kept(out.part[row], out.begin[row], first, turn, xp)
        start, more = (x[:, None] for x in span)
        position = xp.where(column < more, start + column, begin + column - more)
    tokens = xp.take_along_axis(
        out.tokens[row], xp.minimum(position, out.tokens.shape[1] - 1), axis=1
    )
    count = xp.where(episode < out.tokens.shape[0], (more + end - begin)[:, 0], 0)
    start = xp.full_like(count, context.prefix)
    return xp.where(position < end, tokens, pad_id), start, count


def take(x: jax.Array, index: jax.Array, fill: Any = 0) -> jax.Array:
    """Take x [B, T, ...] at index int32 [B, K, W]: [B, K, W, ...], `fill` where the index is T."""
    rows = jnp.arange(x.shape[0])[:, None, None]
    return jnp.asarray(x).at[rows, index].get(mode='fill', fill_value=fill)


def split_turns(x: Any, found: WindowIndex) -> Any:
    """Split every array [B, T, ...] of a tree into one row per turn, [B * K, W, ...]."""

    def one(a):
        return take(a, found.index).reshape(-1, found.index.shape[2], *a.shape[2:])

    return jax.tree.map(one, x)


def of_episode(x: jax.Array, found: WindowIndex) -> jax.Array:
    """Repeat a per-episode array [B, ...] for each sample of the episode: [B * K, ...]."""
    return jnp.repeat(x, found.index.shape[1], axis=0)


def own_turn_mask(mask: jax.Array, found: WindowIndex) -> jax.Array:
    """Split a mask bool [B, T] into [B * K, W], true only in each sample's own turn."""
    return split_turns(mask, found) & found.own.reshape(-1, found.own.shape[2])


def split_batch(batch: Batch, found: WindowIndex) -> Batch:
    """Split a batch into one row per turn, in which only the tokens of that turn are trained."""
    masks = {name: own_turn_mask(getattr(batch, name), found) for name in ('mask', 'value_mask')}

    def split(x):
        return own_turn_mask(x, found) if x.dtype == bool else of_episode(x, found)

    extra = jax.tree.map(split, batch.extra)
    return split_turns(batch.replace(extra={}), found).replace(**masks, extra=extra)


def scatter_back(x: jax.Array, found: WindowIndex, length: int) -> jax.Array:
    """Scatter [B * K, W] of the samples back to [B, T]: each token's value in its own turn."""
    x = x.reshape(found.index.shape)
    index = jnp.where(found.own, found.index, length)
    rows = jnp.arange(index.shape[0])[:, None, None]
    return jnp.zeros((index.shape[0], length), x.dtype).at[rows, index].set(x, mode='drop')
