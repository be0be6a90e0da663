"""Grouped-query attention: whole rows, blocks against a cache, and one token against a cache.

Letters: R rows, O queries of a row, T keys, Kh key-value heads, G query heads per key-value head,
Dh head width. Scores and softmax are float32; keys and values are never repeated over G.
"""

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.models import kernels

NEVER = (
    -1e30
)  # score of a key that may not be visible; finite, so that rows without keys stay finite
BLOCK = 64  # cache entries per step of attend_blocks
WIDE_BLOCK = 128  # ... of attend_filled
FEW_BLOCKS = 4  # up to this many, copying the blocks in use costs more than reading the whole cache
SCORE_BYTES = 3 << 19  # scores that attend_rows has alive at a time on a CPU


@struct.dataclass
class Visible:
    """Which keys queries attend to."""

    mask: jax.Array  # bool [R, O, T]; of units, those of the leads, which are the first T of a row
    length: jax.Array | None = None  # int32 [R]  real tokens of a row; of a cache, entries the last
    # query sees
    rest: jax.Array | None = None  # bool [R * M, S, T + S], of rows that are units: a lead, and M
    # times S tokens that see of it, and of their own S, what is here (models.prefixes)


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
    weights = weights.astype(v.dtype).reshape(rows, heads, members * queries, -1)
    out = jnp.einsum('rknt,rktd->rknd', weights, v, preferred_element_type=jnp.float32)
    out = (out / normaliser).astype(v.dtype).reshape(rows, heads, members, queries, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, queries, -1)


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, shards: int = 1
) -> jax.Array:
    """attend(); on the CPU a few rows at a time, so that their scores stay in its cache.

    shards: contiguous blocks into which the rows are split over devices; each keeps its own.
    """
    rows, queries, heads, members, _ = q.shape
    local = rows // shards if rows % shards == 0 else rows
    most = max(1, SCORE_BYTES // (4 * heads * members * queries * k.shape[1]))
    parts = next(n for n in range(1, local + 1) if local % n == 0 and local // n <= most)
    if parts == 1:
        return attend(q, k, v, mask)

    def by_parts(*arrays):
        # Row i goes to part i % parts, so that every part has rows of each device's block.
        arrays = [x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1) for x in arrays]
        # Scores are computed again for the gradient: storing and reading them costs more.
        out = jax.lax.map(lambda part: jax.checkpoint(attend)(*part), arrays)
        return out.swapaxes(0, 1).reshape(rows, queries, -1)

    return jax.lax.platform_dependent(q, k, v, mask, cpu=by_parts, default=attend)


def attend_units(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, shards: int = 1
) -> jax.Array:
    """attend() of units: q [R, O, Kh, G, Dh], k and v [R, O, Kh, Dh] with O = T + M * S."""
    length = visible.mask.shape[1]
    out = attend_rows(*(x[:, :length] for x in (q, k, v)), visible.mask, shards=shards)
    members, room = len(visible.rest) // len(q), visible.rest.shape[1]

    def own(x):  # [R * M, S, ...]
        return x[:, length:].reshape(-1, room, *x.shape[2:])

    def keys(x):
        lead = jnp.repeat(x[:, :length], members, axis=0)
        return jnp.concatenate([lead, own(x)], axis=1)

    rest = attend_rows(own(q), keys(k), keys(v), visible.rest, shards=shards)
    return jnp.concatenate([out, rest.reshape(len(q), members * room, -1)], axis=1)


def attend_cache(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, fused: str = ''
) -> jax.Array:
    """attend() against a cache; mask[r, o] is a prefix of the keys. fused: see kernels.py."""
    mask = visible.mask
    if fused and q.shape[1] == 1:
        return kernels.attend_one(fused, q, k, v, visible.length)
    if _heads_are_split():
        return attend_rows(q, k, v, mask)
    if q.shape[1] != 1:
        # An observation is far shorter than the cache, and most caches are far from full: reading
        # 32 tokens of 16 rows took 39 ms instead of 61 with 0 to 64 of 1056 entries filled, and 59
        # with all (4 layers, hidden size 256, one core).
        if k.shape[1] < max(FEW_BLOCKS * BLOCK, 2 * q.shape[1]):
            return attend_rows(q, k, v, mask)
        return jax.lax.platform_dependent(q, k, v, mask, cpu=attend_filled, default=attend)
    # A loop of data-dependent length costs a GPU a host round trip per iteration, so only the CPU
    # loops: 0.92 s against 1.6 s (attend_one) and 2.5 s (attend) for 64 tokens of 64 rows, 232 of
    # 512 cache entries in use, 6 layers; bound by memory.
    if k.shape[1] <= FEW_BLOCKS * BLOCK:
        return attend_one(q, k, v, mask)
    return jax.lax.platform_dependent(q, k, v, mask, cpu=attend_blocks, default=attend_one)


def _heads_are_split() -> bool:
    """Heads may lie on different devices: then they must not be contracted over."""
    mesh = jax.sharding.get_abstract_mesh()
    return 'tensor' in mesh.axis_names and mesh.shape['tensor'] > 1


def _spread(q: jax.Array) -> jax.Array:
    """q [R, 1, Kh, G, Dh] -> [R, Kh * G, Kh * Dh]: each head's query on its own channels, else 0.

    So all heads are one product with the cache as it lies in memory, [T, Kh * Dh], without a copy
    that moves the heads to the front; the zeros cost arithmetic that a decode step has to spare.
    """
    rows, _, heads, members, width = q.shape
    own = jnp.eye(heads, dtype=q.dtype)[None, :, None, :, None]
    return (q[:, 0, :, :, None] * own).reshape(rows, heads * members, heads * width)


def _gather(out: jax.Array, heads: int) -> jax.Array:
    """out [R, Kh * G, Kh * Dh] -> [R, 1, Kh * G * Dh]: each head's own channels."""
    rows, queries, channels = out.shape
    out = out.reshape(rows, heads, queries // heads, heads, channels // heads)
    own = jnp.eye(heads, dtype=bool)[None, :, None, :, None]
    return jnp.where(own, out, 0).sum(3).reshape(rows, 1, -1)


def attend_one(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """attend() for one query a row (O = 1)."""
    rows, length, heads, width = k.shape
    k, v = (x.reshape(rows, length, heads * width) for x in (k, v))
    scores = jnp.einsum('rnd,rtd->rnt', _spread(q), k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * width**-0.5, NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum('rnt,rtd->rnd', weights, v, preferred_element_type=jnp.float32)
    return _gather(out.astype(v.dtype), heads)


def attend_blocks(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """attend_one() that reads the cache only up to the longest row, block by block."""
    rows, length, heads, width = k.shape
    k, v = (x.reshape(rows, length, heads * width) for x in (k, v))
    query = _spread(q)

    def score(keys, visible):
        scores = jnp.einsum('rnd,rtd->rnt', query, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible, scores * width**-0.5, NEVER)

    def weigh(weights, values):
        return jnp.einsum('rnt,rtd->rnd', weights, values, preferred_element_type=jnp.float32)

    out = _in_blocks(k, v, mask, score, weigh, block=BLOCK, shape=query.shape)
    return _gather(out.astype(v.dtype), heads)


def attend_filled(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """attend() that reads the cache only up to the longest row, block by block."""
    rows, queries, heads, members, width = q.shape
    query = q.transpose(0, 2, 3, 1, 4).reshape(rows, heads, members * queries, width)

    def score(keys, visible):
        scores = jnp.einsum('rknd,rtkd->rknt', query, keys, preferred_element_type=jnp.float32)
        apart = scores.reshape(rows, heads, members, queries, -1) * width**-0.5
        return jnp.where(visible[:, None, None], apart, NEVER).reshape(scores.shape)

    def weigh(weights, values):
        return jnp.einsum('rknt,rtkd->rknd', weights, values, preferred_element_type=jnp.float32)

    out = _in_blocks(k, v, mask, score, weigh, block=WIDE_BLOCK, shape=query.shape, counted=True)
    out = out.astype(v.dtype).reshape(rows, heads, members, queries, width)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, queries, -1)


def _in_blocks(
    k, v, mask, score, weigh, *, block: int, shape: tuple[int, ...], counted: bool = False
) -> jax.Array:
    """Values v [R, T, ...] weighted by softmax of scores, up to the longest row; float32 [*shape].

    score(keys, visible bool [R, O, t]) -> scores [*shape[:-1], t] of t entries, weigh(weights,
    values) -> their sum [*shape]. Running maximum m, normaliser l and output o as in
    arXiv:1805.02867; a block that a query does not see leaves its m, l and o unchanged to the
    bit, so other rows do not matter. counted: the loop has the length of the whole cache, which
    can be read in the program, and passes over the rest of it; as fast where blocks are few.
    """
    length = k.shape[1]
    block = min(block, length)
    blocks = -(-jnp.max(mask.sum(-1)) // block)

    def body(i, carry):
        m, l, o = carry  # noqa: E741
        # The last block is moved back to fit; what it has in common with the one before is masked.
        start = jnp.minimum(i * block, length - block)
        new = start + jnp.arange(block) >= i * block
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, block, 1) for x in (k, v))
        visible = jax.lax.dynamic_slice_in_dim(mask, start, block, 2) & new[None, None]
        scores = score(keys, visible)
        highest = jnp.maximum(m, scores.max(-1))
        old, weights = jnp.exp(m - highest), jnp.exp(scores - highest[..., None])
        part = weigh(weights.astype(v.dtype), values)
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
