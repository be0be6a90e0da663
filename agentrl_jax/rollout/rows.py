"""Rows of tokens in a KV cache: sample one token of each, push it, or read a block of new ones.

What both kinds of rollout share. A row knows no episode, turn or world: it is a cache, the hidden
state of its last token, two lengths and the number of its random stream. A token of stream e at
position t is drawn with fold_in(fold_in(key, e), t): neither the schedule, nor the row, nor the
mesh changes which tokens an episode gets.

Where parameters are a Pair every token goes through both models, each with a cache of its own, and
a row takes the hidden states of the one that answers its turn.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.models.base import KVCache, Model
from agentrl_jax.types import Pair, Params


@struct.dataclass
class Rows:
    """State of S rows."""

    cache: KVCache  # keys and values, S rows of T (or fewer) positions
    hidden: jax.Array  # compute dtype [S, D]  final hidden state of the last token
    length: jax.Array  # int32 [S]  tokens of the episode so far: position of the next draw
    context: jax.Array  # int32 [S]  tokens in the cache: as many, or those of the last turns
    stream: jax.Array  # int32 [S]  random stream of the row's tokens
    other_cache: KVCache | None = None  # of the other model of a Pair
    other: jax.Array | None = None  # bool [S]  it answers the turn

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """Of one model or two."""
        return (self.cache,) if self.other is None else (self.cache, self.other_cache)

    def replace_caches(self, caches: tuple[KVCache, ...], **changes: Any) -> 'Rows':
        """With new caches."""
        more = {'other_cache': caches[1]} if len(caches) > 1 else {}
        return self.replace(cache=caches[0], **more, **changes)


def each(params: Params | Pair) -> tuple[Params, ...]:
    """The parameters of one model or two."""
    return (params.policy, params.other) if isinstance(params, Pair) else (params,)


def forward(
    rows: Rows,
    params: Params | Pair,
    tokens: jax.Array,
    position: jax.Array,
    which: jax.Array | None,
    *,
    config: Model,
) -> tuple[jax.Array, tuple[KVCache, ...]]:
    """forward_cached of tokens [w, C] of rows `which` int32 [w], None: of all; (hidden, caches)."""
    caches = rows.caches
    out = [
        config.forward_cached(one, tokens, position, cache, which)
        for one, cache in zip(each(params), caches, strict=True)
    ]
    hidden, caches = zip(*out, strict=True)
    if rows.other is None:
        return hidden[0], caches
    other = rows.other if which is None else rows.other.at[which].get(mode='clip')
    return jnp.where(other[:, None, None], hidden[1], hidden[0]), caches


def start(
    params: Params | Pair, config: Model, prefix: jax.Array, rows: int, cache_tokens: int
) -> Rows:
    """S rows that hold nothing but the common prefix int32 [P]."""
    length = jnp.full(rows, prefix.shape[0], jnp.int32)
    cache, *others = (
        prefill_prefix(one, config, prefix, rows, cache_tokens) for one in each(params)
    )
    return Rows(
        cache=cache,
        other_cache=others[0] if others else None,
        other=jnp.zeros(rows, bool) if others else None,
        hidden=jnp.zeros((rows, config.hidden_size), config.dtype),
        length=length,
        context=length,
        stream=jnp.zeros(rows, jnp.int32),
    )


def prefill_prefix(
    params: Params, config: Model, prefix: jax.Array, rows: int, cache_tokens: int
) -> KVCache:
    """Runs the prefix that all episodes share once and copies its keys and values to every row."""
    # Two rows: XLA's CPU matmul takes another path for a single one, with other last bits.
    one = config.init_cache(2, prefix.shape[0])
    tokens = jnp.broadcast_to(prefix, (2, prefix.shape[0]))
    positions = jnp.broadcast_to(jnp.arange(prefix.shape[0]), tokens.shape)
    _, one = config.forward_cached(params, tokens, positions, one, None)
    full = config.init_cache(rows, cache_tokens)

    def spread(into, prefix_part):
        return into.at[:, : prefix.shape[0]].set(prefix_part[:1])

    return jax.tree.map(spread, full, one)


def sample(
    rows: Rows,
    params: Params | Pair,
    key: jax.Array,
    *,
    config: Model,
    draw: Callable,
    head: jax.Array | Pair | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The next token of every row and its log-probability: int32 [S], float32 [S].

    draw(logits [S, V], uniform [S]): sampling.sample with its settings. head [D, U]: it gets logits
    of these columns alone.
    """
    heads = each(head) if head is not None else (None,) * len(each(params))
    logits, *others = (
        config.logits(one, rows.hidden, own) for one, own in zip(each(params), heads, strict=True)
    )
    if others:
        logits = jnp.where(rows.other[:, None], others[0], logits)

    def uniform(stream, position):
        row_key = jax.random.fold_in(key, stream)
        return jax.random.uniform(jax.random.fold_in(row_key, position))

    return draw(logits, jax.vmap(uniform)(rows.stream, rows.length))


def push(
    rows: Rows, params: Params | Pair, token: jax.Array, live: jax.Array, *, config: Model
) -> Rows:
    """The token int32 [S] of each live row bool [S] goes through the model and into its cache."""
    position = jnp.where(live, rows.context, rows.cache.length)
    hidden, caches = forward(rows, params, token[:, None], position[:, None], None, config=config)
    return rows.replace_caches(
        caches,
        hidden=hidden[:, 0],
        length=rows.length + live,
        context=rows.context + live,
    )


def prefill(
    rows: Rows,
    params: Params | Pair,
    which: jax.Array,
    tokens: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    *,
    config: Model,
    wanted: jax.Array | None = None,
) -> Rows:
    """Reads a block: tokens int32 [w, C], the first `count` of them, into rows `which` int32 [w].

    begin int32 [w]: position in the cache of the first token. Rows >= S are padding. Nothing is
    read where `wanted` bool [] is false: all rows must be padding then. Sets cache, hidden and
    context; lengths are the caller's.
    """
    column = jnp.arange(tokens.shape[1])[None]
    position = jnp.where(column < count[:, None], begin[:, None] + column, rows.cache.length)

    def run(caches):
        held = rows.replace_caches(caches)
        hidden, caches = forward(held, params, tokens, position, which, config=config)
        last = jnp.maximum(count - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0], caches

    def nothing(caches):
        return jnp.zeros((which.shape[0], config.hidden_size), config.dtype), caches

    caches = rows.caches
    if wanted is None:
        hidden, caches = run(caches)
    else:
        # With a negated condition XLA copies the whole cache, and on a GPU with any: there it costs
        # less to read a block of padding (5.8 ms a copy of 4.5 GB on an H100, on paper)
        def asked(caches):
            return jax.lax.cond(wanted, run, nothing, caches)

        hidden, caches = jax.lax.platform_dependent(caches, cuda=run, default=asked)
    return rows.replace_caches(
        caches,
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
    """The caches of row source[i] onto row target[i] for i < count int32 []; both int32 [w].

    `size` positions of it from `begin` on; None: all. One row after another, so that the cache
    stays in place and only as much moves as is asked for.
    """

    def one(i, caches):
        def move(x):
            after = (begin, *(0,) * (x.ndim - 2))
            part = (1, x.shape[1] if size is None else size, *x.shape[2:])
            row = jax.lax.dynamic_slice(x, (source[i], *after), part)
            return jax.lax.dynamic_update_slice(x, row, (target[i], *after))

        return jax.tree.map(move, caches)

    return rows.replace_caches(jax.lax.fori_loop(0, count, one, rows.caches))
