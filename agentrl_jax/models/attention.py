"""Grouped-query attention: full rows, blocks against a cache, and one token against a cache.

Letters: R rows, O queries of a row, T keys, Kh key-value heads, G query heads per key-value head,
Dh head width. Scores and softmax are float32. Keys and values are never repeated over G.
"""

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.models import kernels

NEVER = -1e30  # score of a masked key; finite, so that rows without visible keys stay finite
BLOCK = 64  # cache entries per step of attend_blocks
WIDE_BLOCK = 128  # cache entries per step of attend_filled
FEW_BLOCKS = 4  # up to this many blocks, reading the full cache is cheaper than copying blocks
SCORE_BYTES = 3 << 19  # bytes of scores that attend_rows holds at a time on a CPU


@struct.dataclass
class AttentionMask:
    """Keys that each query attends to."""

    mask: jax.Array  # bool [R, O, T]; for units: of the leads, the first T tokens of each row
    length: jax.Array | None = None  # int32 [R]  real tokens of a row; with a cache: entries that
    # the last query attends to
    rest: jax.Array | None = None  # bool [R * M, S, T + S], only for units (models.prefixes): the
    # masks of the M rests of a row, S tokens each; keys are the lead's T tokens, then the rest's S


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(Dh)) v.

    q [R, O, Kh, G, Dh], k and v [R, T, Kh, Dh], mask bool [R, O, T]; returns [R, O, Kh * G * Dh].
    """
    rows, queries, heads, members, width = q.shape
    q = q.transpose(0, 2, 3, 1, 4).reshape(rows, heads, members * queries, width)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum('rknd,rktd->rknt', q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, heads, members, queries, -1) * width**-0.5
    scores = jnp.where(mask[:, None, None], scores, NEVER)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    normaliser = weights.sum(-1).reshape(rows, heads, -1, 1)
    weights = weights.reshape(rows, heads, members * queries, -1)
    out = _weigh('rknt,rktd->rknd', weights, v)
    out = (out / normaliser).astype(v.dtype).reshape(rows, heads, members, queries, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, queries, -1)


def _weigh(equation: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sum values with float32 weights, in float32.

    A CPU keeps the weights in float32: each function here would round them differently to
    bfloat16. Elsewhere that would copy a bfloat16 cache into a float32 one.
    """

    def rounded(weights, values):
        weights = weights.astype(values.dtype)
        return jnp.einsum(equation, weights, values, preferred_element_type=jnp.float32)

    def exact(weights, values):
        return jnp.einsum(equation, weights, values.astype(jnp.float32))

    if values.dtype == jnp.float32:
        return rounded(weights, values)
    return jax.lax.platform_dependent(weights, values, cpu=exact, default=rounded)


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, shards: int = 1
) -> jax.Array:
    """attend(), on a CPU a few rows at a time so that their scores stay in its cache.

    shards: number of contiguous blocks of rows, one per device.
    """
    rows, queries, heads, members, _ = q.shape
    local = rows // shards if rows % shards == 0 else rows
    rows_at_once = max(1, SCORE_BYTES // (4 * heads * members * queries * k.shape[1]))
    parts = next(n for n in range(1, local + 1) if local % n == 0 and local // n <= rows_at_once)
    if parts == 1:
        return attend(q, k, v, mask)

    def by_parts(*arrays):
        # Row i goes to part i % parts, so that every part has rows of each device.
        arrays = [x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1) for x in arrays]
        # Recompute scores for the gradient: storing and reading them costs more.
        out = jax.lax.map(lambda part: jax.checkpoint(attend)(*part), arrays)
        return out.swapaxes(0, 1).reshape(rows, queries, -1)

    return jax.lax.platform_dependent(q, k, v, mask, cpu=by_parts, default=attend)


def attend_units(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: AttentionMask, *, shards: int = 1
) -> jax.Array:
    """attend() for units: q [R, O, Kh, G, Dh], k and v [R, O, Kh, Dh] with O = T + M * S."""
    length = visible.mask.shape[1]
    out = attend_rows(*(x[:, :length] for x in (q, k, v)), visible.mask, shards=shards)
    members, room = len(visible.rest) // len(q), visible.rest.shape[1]

    def rests_of(x):  # [R * M, S, ...]
        return x[:, length:].reshape(-1, room, *x.shape[2:])

    def keys(x):
        lead = jnp.repeat(x[:, :length], members, axis=0)
        return jnp.concatenate([lead, rests_of(x)], axis=1)

    rest = attend_rows(rests_of(q), keys(k), keys(v), visible.rest, shards=shards)
    return jnp.concatenate([out, rest.reshape(len(q), members * room, -1)], axis=1)


def attend_cache(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: AttentionMask, fused: str = ''
) -> jax.Array:
    """attend() against a cache; mask[r, o] selects a prefix of the keys. fused: see kernels.py."""
    mask = visible.mask
    if fused and q.shape[1] == 1:
        return kernels.attend_one(fused, q, k, v, visible.length)
    if _heads_are_split():
        return attend_rows(q, k, v, mask)
    if q.shape[1] != 1:
        # Observations are much shorter than the cache, and most caches are far from full. Reading
        # 32 tokens of 16 rows took 39 ms instead of 61 with 0 to 64 of 1056 entries filled, and 59
        # with all filled (4 layers, hidden size 256, one core).
        if k.shape[1] < max(FEW_BLOCKS * BLOCK, 2 * q.shape[1]):
            return attend_rows(q, k, v, mask)
        return jax.lax.platform_dependent(q, k, v, mask, cpu=attend_filled, default=attend)
    # A loop of data-dependent length costs a GPU one host round trip per iteration, so only the CPU
    # loops: 0.92 s against 1.6 s (attend_one) and 2.5 s (attend) for 64 tokens of 64 rows, 232 of
    # 512 cache entries in use, 6 layers; memory-bound.
    if k.shape[1] <= FEW_BLOCKS * BLOCK:
        if k.dtype == jnp.float32:
            return attend_one(q, k, v, mask)
        # attend() adds in the order of full rows; in bfloat16, another order changes later tokens.
        return jax.lax.platform_dependent(q, k, v, mask, cpu=attend, default=attend_one)
    return jax.lax.platform_dependent(q, k, v, mask, cpu=attend_blocks, default=attend_one)


def _heads_are_split() -> bool:
    """Return whether heads may be on different devices and so must not be contracted over."""
    mesh = jax.sharding.get_abstract_mesh()
    return 'tensor' in mesh.axis_names and mesh.shape['tensor'] > 1


def attend_one(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """attend() for one query per row (O = 1)."""
    rows, length, heads, width = k.shape
    k, v = (x.reshape(rows, length, heads * width) for x in (k, v))
    scores = jnp.einsum('rnd,rtd->rnt', kernels.spread(q), k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * width**-0.5, NEVER)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = _weigh('rnt,rtd->rnd', weights, v)
    out /= weights.sum(-1, keepdims=True)
    return kernels.gather(out.astype(v.dtype), heads)


def attend_blocks(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """attend_one() that reads the cache block by block, only up to the longest row."""
    rows, length, heads, width = k.shape
    k, v = (x.reshape(rows, length, heads * width) for x in (k, v))
    query = kernels.spread(q)

    def score(keys, visible):
        scores = jnp.einsum('rnd,rtd->rnt', query, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible, scores * width**-0.5, NEVER)

    def weigh(weights, values):
        return _weigh('rnt,rtd->rnd', weights, values)

    out = _in_blocks(k, v, mask, score, weigh, block=BLOCK, shape=query.shape)
    return kernels.gather(out.astype(v.dtype), heads)


def attend_filled(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """attend() that reads the cache block by block, only up to the longest row."""
    rows, queries, heads, members, width = q.shape
    query = q.transpose(0, 2, 3, 1, 4).reshape(rows, heads, members * queries, width)

    def score(keys, visible):
        scores = jnp.einsum('rknd,rtkd->rknt', query, keys, preferred_element_type=jnp.float32)
        by_member = scores.reshape(rows, heads, members, queries, -1) * width**-0.5
        return jnp.where(visible[:, None, None], by_member, NEVER).reshape(scores.shape)

    def weigh(weights, values):
        return _weigh('rknt,rtkd->rknd', weights, values)

    out = _in_blocks(k, v, mask, score, weigh, block=WIDE_BLOCK, shape=query.shape, counted=True)
    out = out.astype(v.dtype).reshape(rows, heads, members, queries, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, queries, -1)


def _in_blocks(
    k, v, mask, score, weigh, *, block: int, shape: tuple[int, ...], counted: bool = False
) -> jax.Array:
    """Sum of values v [R, T, ...] weighted by softmax(scores), up to the longest row.

    Returns float32 [*shape]. score(keys, visible bool [R, O, t]) gives scores [*shape[:-1], t] of t
    entries; weigh(weights, values) gives their weighted sum [*shape]. Running maximum m, normaliser
    l and output o as in arXiv:1805.02867. A block with no visible key leaves a query's m, l and o
    unchanged to the bit, so other rows do not affect it. counted: loop over the full cache, a
    static length, and skip unused blocks; equally fast for few blocks.
    """
    length = k.shape[1]
    block = min(block, length)
    blocks = -(-jnp.max(mask.sum(-1)) // block)

    def body(i, carry):
        m, l, o = carry  # noqa: E741
        # The last block is moved back to fit; its overlap with the previous block is masked.
        start = jnp.minimum(i * block, length - block)
        new = start + jnp.arange(block) >= i * block
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, block, 1) for x in (k, v))
        visible = jax.lax.dynamic_slice_in_dim(mask, start, block, 2) & new[None, None]
        scores = score(keys, visible)
        highest = jnp.maximum(m, scores.max(-1))
        old, weights = jnp.exp(m - highest), jnp.exp(scores - highest[..., None])
        part = weigh(weights, values)
        return highest, l * old + weights.sum(-1), o * old[..., None] + part

    start = (
        jnp.full(shape[:-1], NEVER, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    if counted:
        _, normaliser, out = jax.lax.fori_loop(
            0,
            -(-length // block),
            lambda i, carry: jax.lax.cond(i < blocks, body, lambda _, same: same, i, carry),
            start,
        )
    else:
        _, normaliser, out = jax.lax.fori_loop(0, blocks, body, start)
    return out / normaliser[..., None]
