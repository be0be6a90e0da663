"""Fused attention kernels, which neither store scores nor read unused cache entries.

`Model.fused` selects the kernels: 'cudnn' (NVIDIA GPUs), 'pallas' (TPUs) or '' (attention.py).
They compute in bfloat16 with float32 sums and agree with attention.py up to rounding. Dimension
letters are those of attention.py.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask
from jax.sharding import PartitionSpec as P

KINDS = {'gpu': 'cudnn', 'tpu': 'pallas'}  # by the platform of the devices
LANES = 128  # lanes of a TPU's vector registers; block sizes are multiples of it
BLOCKS = (512, 384, 256, 128)  # possible sides of a block of scores on a TPU
CACHE_BLOCK = 256  # cache entries of a row that a TPU fetches at once
CUDNN = 'cudnn'  # 'xla' in tests: the same call without a GPU
INTERPRET = False  # True in tests: run Pallas kernels without a TPU


def kind_for(platform: str, dtype: str, head_dim: int) -> str:
    """Return Model.fused for a platform ('cpu', 'gpu', 'tpu')."""
    fits = dtype == 'bfloat16' and head_dim % 64 == 0 and head_dim <= 128
    return KINDS[platform] if fits and platform in KINDS else ''


def attend_rows(
    kind: str, q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, rows: Any
) -> jax.Array:
    """Causal attention within rows; the first `length` int32 [R] tokens of a row are real.

    q [R, T, Kh, G, Dh], k and v [R, T, Kh, Dh]; returns [R, T, Kh * G * Dh], finite but
    meaningless at padding. rows: the layout of rows on a mesh (sharding.shard_rows), or None.
    """
    attend = _splash if kind == 'pallas' else _cudnn_rows
    if rows is None:
        return attend(q, k, v, length)
    mesh, axes = rows.mesh, rows.spec[0]
    split = q.shape[0] % math.prod(mesh.shape[axis] for axis in axes) == 0
    return _by_device(attend, mesh, axes if split else None, mesh.axis_names)(q, k, v, length)


def attend_one(kind: str, q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attention of one query per row to the first `length` entries of its cache.

    q [R, 1, Kh, G, Dh], k and v [R, T, Kh, Dh], length int32 [R] >= 1; returns [R, 1, Kh * G * Dh].
    On a mesh rows are already split: each shard is its own program (device.collect_on_mesh).
    """
    attend = _ragged if kind == 'pallas' else _cudnn_one
    mesh = jax.sharding.get_abstract_mesh()
    if 'tensor' not in mesh.axis_names:
        return attend(q, k, v, length)
    return _by_device(attend, mesh, None, {'tensor'})(q, k, v, length)


def _by_device(attend: Callable, mesh: Any, rows: Any, axes: Any) -> Callable:
    """Run `attend` on each device with its rows and heads; the compiler cannot split kernels."""

    def run(q, k, v, length):
        heads = 'tensor' if k.shape[2] % mesh.shape['tensor'] == 0 else None
        spec = P(rows, None, heads)
        local = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(spec, spec, spec, P(rows)),
            out_specs=spec,
            axis_names=set(axes),
            check_vma=False,
        )
        return local(q, k, v, length)

    return run


def spread(q: jax.Array) -> jax.Array:
    """q [R, 1, Kh, G, Dh] -> [R, Kh * G, Kh * Dh]: each head's query in its own channels, else 0.

    All heads then share one product with the cache in its memory layout, [T, Kh * Dh], and no copy
    has to move the heads to the front. A decode step can afford the arithmetic on the zeros.
    """
    rows, _, heads, members, width = q.shape
    diagonal = jnp.eye(heads, dtype=q.dtype)[None, :, None, :, None]
    return (q[:, 0, :, :, None] * diagonal).reshape(rows, heads * members, heads * width)


def gather(out: jax.Array, heads: int) -> jax.Array:
    """Select each head's channels: out [R, Kh * G, Kh * Dh] -> [R, 1, Kh * G * Dh]."""
    rows, queries, channels = out.shape
    out = out.reshape(rows, heads, queries // heads, heads, channels // heads)
    diagonal = jnp.eye(heads, dtype=bool)[None, :, None, :, None]
    return jnp.where(diagonal, out, 0).sum(3).reshape(rows, 1, -1)


def _cudnn_rows(q, k, v, length):
    tokens = q.shape[1]
    length = jnp.maximum(length, 1)  # unplayed turns have no tokens (rollout.windows)
    odd = tokens % 2  # JAX cannot train rows of odd length
    q, k, v = (jnp.pad(x, [(0, 0), (0, odd)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v))
    return _cudnn(q, k, v, length, length, causal=True)[:, :tokens]


def _cudnn_one(q, k, v, length):
    return _cudnn(q, k, v, jnp.ones_like(length), length, causal=False)


def _cudnn(q, k, v, queries, keys, *, causal: bool) -> jax.Array:
    """Attend from the first `queries` tokens of a row to its first `keys`; both int32 [R]."""
    out = jax.nn.dot_product_attention(
        q.reshape(*q.shape[:2], -1, q.shape[-1]),
        k,
        v,
        query_seq_lengths=queries,
        key_value_seq_lengths=keys,
        is_causal=causal,
        implementation=CUDNN,
    )
    return out.reshape(*q.shape[:2], -1)


# ---- TPU: full rows ----------------------------------------------------------------------------


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """JAX's splash attention. Padding follows the real tokens, so a causal mask suffices."""
    del length
    rows, tokens, heads, members, width = q.shape
    padding = -tokens % LANES
    padded = tokens + padding
    q, k, v = (jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v))
    block = next(b for b in BLOCKS if padded % b == 0)
    causal = splash_attention_mask.CausalMask((padded, padded))
    kernel = splash.make_splash_mqa_single_device(
        splash_attention_mask.MultiHeadMask([causal] * members),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=INTERPRET,
    )
    q = q.transpose(0, 2, 3, 1, 4) * width**-0.5
    out = jax.vmap(jax.vmap(kernel))(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    return out.transpose(0, 3, 1, 2, 4)[:, :tokens].reshape(rows, tokens, -1)


# ---- TPU: one query per row --------------------------------------------------------------------


def _ragged(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attend to a cache without fetching blocks beyond a row's length."""
    rows, entries, heads, width = k.shape
    members, channels = q.shape[3], heads * width
    query = spread(q) * width**-0.5
    block = min(CACHE_BLOCK, entries)

    def at(row, i, length):
        return row, jnp.minimum(i, (length[row] - 1) // block), 0

    def full_row(row, i, length):
        del i, length
        return row, 0, 0

    queries = heads * members
    out = pl.pallas_call(
        functools.partial(_ragged_block, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, pl.cdiv(entries, block)),
            in_specs=[
                pl.BlockSpec((1, queries, channels), full_row),
                pl.BlockSpec((1, block, channels), at),
                pl.BlockSpec((1, block, channels), at),
            ],
            out_specs=pl.BlockSpec((1, queries, channels), full_row),
            scratch_shapes=[
                pltpu.VMEM((queries, LANES), jnp.float32),
                pltpu.VMEM((queries, LANES), jnp.float32),
                pltpu.VMEM((queries, channels), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, v.dtype),
        interpret=INTERPRET,
    )(
        length.astype(jnp.int32),
        query,
        k.reshape(rows, entries, channels),
        v.reshape(rows, entries, channels),
    )
    return gather(out, heads)


def _ragged_block(length, q, k, v, out, highest, normaliser, total, *, block: int):
    """Process one block of one row: running maximum, normaliser and sum (arXiv:1805.02867)."""
    row, i = pl.program_id(0), pl.program_id(1)

    @pl.when(i == 0)
    def _():
        highest[...] = jnp.full_like(highest, -1e30)
        normaliser[...] = jnp.zeros_like(normaliser)
        total[...] = jnp.zeros_like(total)

    @pl.when(i * block < length[row])
    def _():
        scores = jax.lax.dot_general(
            q[0], k[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        entry = i * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        in_row = entry < length[row]
        scores = jnp.where(in_row, scores, -1e30)
        before = highest[:, :1]
        now = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = jnp.exp(scores - now)
        old = jnp.exp(before - now)
        # A block holds arbitrary values past the end of the cache, and 0 * nan is nan
        values = jnp.where(in_row[:1].T, v[0], 0)
        part = jax.lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        total[...] = total[...] * old + part
        summed = normaliser[:, :1] * old + weights.sum(1, keepdims=True)
        normaliser[...] = jnp.broadcast_to(summed, normaliser.shape)
        highest[...] = jnp.broadcast_to(now, highest.shape)

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        out[0] = (total[...] / normaliser[:, :1]).astype(out.dtype)
