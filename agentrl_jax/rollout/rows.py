"""Rows of tokens in a KV cache: append a token per row, or read a block of tokens.

Device and host rollouts share them. A row does not depend on episodes, turns or environments: it is
a cache, the hidden state of its last token, two lengths and the number of its random stream.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.models.base import KVCache, Model, transpose_kernels
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes, Params, Rollout


@struct.dataclass
class Rows:
    """State of S rows."""

    cache: KVCache  # keys and values, S rows of T (or fewer) positions
    hidden: jax.Array  # compute dtype [S, D]  final hidden state of the last token
    length: jax.Array  # int32 [S]  tokens of the episode so far: position of the next draw
    context: jax.Array  # int32 [S]  tokens in the cache: all of them, or only of the last turns
    stream: jax.Array  # int32 [S]  random stream of the row's tokens
    player: Any = None  # state of a Player subclass


@dataclasses.dataclass(frozen=True)
class Player:
    """The model that answers. A subclass may use another model in some turns."""

    model: Model

    # -- parameters

    def each(self, function: Callable[[Params], Any], params: Params) -> Any:
        """Apply a function to the parameters of each model."""
        return function(params)

    @property
    def untransposed(self) -> 'Player':
        """The player for parameters with kernels in the training layout."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, transposed=False))

    def transpose(self, params: Params) -> Params:
        """Convert the kernels of each model to the layout for few rows, if the model uses it."""
        return self.each(transpose_kernels, params) if self.model.transposed else params

    def answer_head(self, params: Params, task: text.TextTask) -> Any:
        """Return the head [D, U] for the tokens of answers; None if any token may be sampled.

        Call it before the loops; inside, the columns would be gathered for every token.
        """
        if task.grammar is None or task.grammar.free:
            return None
        model = dataclasses.replace(self.model, transposed=False)
        return self.each(lambda one: model.head_columns(one, task.grammar.columns), params)

    # -- models

    def empty_cache(
        self, params: Params, prefix: jax.Array, rows: int, cache_tokens: int
    ) -> KVCache:
        """Return the cache of rows that contain only the common prefix int32 [P]."""
        return prefill_prefix(params, self.model, prefix, rows, cache_tokens)

    def empty_state(self, rows: int) -> Any:
        """Return the initial Rows.player."""
        del rows

    def forward(
        self, rows: Rows, params: Params, tokens: jax.Array, position: jax.Array, which: Any
    ) -> tuple[jax.Array, KVCache]:
        """Run forward_cached on tokens [w, C] of rows `which` int32 [w]; None: all rows."""
        return self.model.forward_cached(params, tokens, position, rows.cache, which)

    def logits(self, rows: Rows, params: Params, head: Any = None) -> jax.Array:
        """Return logits [S, V] of the next token; with answer_head, only of its columns."""
        return self.model.logits(params, rows.hidden, head)

    # -- episodes

    def rollout_extra(self, episodes: Episodes, turns: int) -> dict[str, jax.Array]:
        """Return the initial Rollout.extra of E episodes."""
        del episodes, turns
        return {}

    def record(self, out: Rollout, at: Any, task: text.TextTask, world: text.Episode) -> Rollout:
        """Record which player answers the turns `at` of a rollout; world: of w slots."""
        del at, task, world
        return out

    def seat(
        self,
        rows: Rows,
        which: jax.Array,
        task: text.TextTask,
        world: text.Episode,
        out: Rollout,
        episode: jax.Array,
    ) -> Rows:
        """Prepare rows `which` int32 [w] for their next turns.

        episode int32 [w]: rows of out.
        """
        del which, task, world, out, episode
        return rows

    def sampled(self, rows: Rows, live: jax.Array, **token: Any) -> tuple[dict[str, Any], Any]:
        """Return (fields of Rollout for sampled tokens, bool [S] live rows with trained tokens)."""
        del rows
        return token | {'attention_mask': True, 'action_mask': True}, live


def start(params: Params, player: Player, prefix: jax.Array, rows: int, cache_tokens: int) -> Rows:
    """Return S rows that contain only the common prefix int32 [P]."""
    length = jnp.full(rows, prefix.shape[0], jnp.int32)
    return Rows(
        cache=player.empty_cache(params, prefix, rows, cache_tokens),
        hidden=jnp.zeros((rows, player.model.hidden_size), player.model.dtype),
        length=length,
        context=length,
        stream=jnp.zeros(rows, jnp.int32),
        player=player.empty_state(rows),
    )


def prefill_prefix(
    params: Params, model: Model, prefix: jax.Array, rows: int, cache_tokens: int
) -> KVCache:
    """Read the common prefix once and copy its keys and values to every row."""
    # Use two rows: XLA's CPU matmul of a single row takes another path and rounds differently.
    one = model.init_cache(2, prefix.shape[0])
    tokens = jnp.broadcast_to(prefix, (2, prefix.shape[0]))
    positions = jnp.broadcast_to(jnp.arange(prefix.shape[0]), tokens.shape)
    _, one = model.forward_cached(params, tokens, positions, one, None)
    full = model.init_cache(rows, cache_tokens)

    def spread(into, prefix_part):
        return into.at[:, : prefix.shape[0]].set(prefix_part[:1])

    return jax.tree.map(spread, full, one)


def push(rows: Rows, params: Params, token: jax.Array, live: jax.Array, *, player: Player) -> Rows:
    """Run the token int32 [S] of each live row bool [S] through the model and cache it."""
    position = jnp.where(live, rows.context, capacity(rows))
    hidden, cache = player.forward(rows, params, token[:, None], position[:, None], None)
    return rows.replace(
        cache=cache, hidden=hidden[:, 0], length=rows.length + live, context=rows.context + live
    )


def capacity(rows: Rows) -> int:
    """Return the number of cache positions per row."""
    return jax.tree.leaves(rows.cache)[0].shape[1]


def prefill(
    rows: Rows,
    params: Params,
    which: jax.Array,
    block: tuple[jax.Array, jax.Array, jax.Array],
    *,
    player: Player,
    wanted: jax.Array | None = None,
) -> Rows:
    """Read a block into rows `which` int32 [w].

    block: (tokens int32 [w, C], begin int32 [w], count int32 [w]). The first `count` tokens are
    read into the cache, starting at position `begin`. Rows >= S are padding. If `wanted` bool [] is
    false, nothing is read and all rows must be padding. Sets cache, hidden and context; the caller
    sets lengths.
    """
    tokens, begin, count = block
    column = jnp.arange(tokens.shape[1])[None]
    position = jnp.where(column < count[:, None], begin[:, None] + column, capacity(rows))

    def run(cache):
        held = rows.replace(cache=cache)
        hidden, cache = player.forward(held, params, tokens, position, which)
        last = jnp.maximum(count - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0], cache

    def nothing(cache):
        return jnp.zeros((which.shape[0], player.model.hidden_size), player.model.dtype), cache

    if wanted is None:
        hidden, cache = run(rows.cache)
    else:
        # XLA copies the full cache if the condition is negated, and on a GPU with any condition.
        # There a block of padding is cheaper (estimate: 5.8 ms to copy 4.5 GB on an H100).
        def conditional_run(cache):
            return jax.lax.cond(wanted, run, nothing, cache)

        hidden, cache = jax.lax.platform_dependent(rows.cache, cuda=run, default=conditional_run)
    return rows.replace(
        cache=cache,
        hidden=rows.hidden.at[which].set(hidden, mode='drop'),
        context=rows.context.at[which].set(begin + count, mode='drop'),
    )


def copy(
    rows: Rows,
    source: jax.Array,
    target: jax.Array,
    count: jax.Array,
    *,
    begin: int = 0,
    size: int | None = None,
) -> Rows:
    """Copy the cache of row source[i] onto row target[i] for i < count int32 []; both int32 [w].

    Copies `size` positions starting at `begin`; None: all. Rows are copied one by one, so that the
    cache is updated in place and only the copied positions move.
    """

    def one(i, cache):
        def move(x):
            after = (begin, *(0,) * (x.ndim - 2))
            part = (1, x.shape[1] if size is None else size, *x.shape[2:])
            row = jax.lax.dynamic_slice(x, (source[i], *after), part)
            return jax.lax.dynamic_update_slice(x, row, (target[i], *after))

        return jax.tree.map(move, cache)

    return rows.replace(cache=jax.lax.fori_loop(0, count, one, rows.cache))
