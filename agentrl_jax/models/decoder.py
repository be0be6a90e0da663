"""Flax Linen modules of decoder-only transformers, shared by the families.

Parameters are cast to the compute dtype at each use. Norms, rotary angles and softmax are float32.

Letters: B or R rows, O or T tokens, S cache rows, D hidden, H query heads, Kh key-value heads,
G = H / Kh query heads per key-value head, Dh head width.
"""

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.models import kernels, layer_scan
from agentrl_jax.models.attention import AttentionMask, attend_cache, attend_rows, attend_units

SCAN_FROM = 8  # layers; fewer compile equally fast without a loop


@struct.dataclass
class KVCache:
    """Keys and values of S rows; index t of a row holds the token at position t."""

    # Heads share one axis: a TPU would pad each head to 128 channels and copy the cache to read it
    k: tuple[jax.Array, ...]  # per layer [S, T, Kh * Dh], rotated
    v: tuple[jax.Array, ...]  # per layer [S, T, Kh * Dh]

    @property
    def length(self) -> int:
        return self.k[0].shape[1]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, computed in float32 (arXiv:1910.07467).

    Returns nan if the mean overflows float32. 1 / sqrt(inf) would give zeros, and a diverged model
    would look like an untrained one.
    """

    eps: float
    dtype: str
    scaled_in: str = ''  # dtype of the product with the scale; '' = dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param('scale', nn.initializers.ones_init(), (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        power = jnp.mean(x * x, axis=-1, keepdims=True) + self.eps
        x = x * jnp.where(power < jnp.inf, jax.lax.rsqrt(power), jnp.nan)
        # Round before the scale, as transformers does in most families, to agree in bfloat16
        x, scale = (y.astype(self.scaled_in or self.dtype) for y in (x, scale))
        return (x * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder and how it computes; a family defines its attention and norms."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool = True  # the output head is the embedding transposed
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    rope_scaling: tuple[float, float, float, float] | None = None  # Llama 3: see rope_frequencies
    dtype: str = 'float32'  # compute dtype
    lora_scale: float = 1.0  # alpha / rank, scale of the low-rank corrections in params['lora']
    remat: bool = False  # recompute each layer in the backward pass of forward()
    scan_layers: bool | None = None  # layers of forward() as one loop; None: see `scans`
    transposed: bool = False  # kernels are [out, in]; see transpose_kernels
    fused: str = ''  # attention kernels: 'cudnn', 'pallas' or '' (none); see kernels.kind_for

    ATTENTION: ClassVar['type[Attention]']
    NORMS: ClassVar[tuple[tuple[str, str], ...]]  # (before, after) attention, then MLP; '' = none
    SCALED_IN: ClassVar[str] = ''  # RMSNorm.scaled_in

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}'
            )
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim} must be even for rotary positions')

    def norm(self, name: str) -> RMSNorm:
        """Create a norm inside a module."""
        return RMSNorm(self.rms_norm_eps, self.dtype, self.SCALED_IN, name=name)

    @property
    def scans(self) -> bool:
        """Whether forward() runs its layers as a loop, which is free only with remat.

        Without remat the loop keeps one array several times and is slower (experiments/LOG.md).
        """
        deep = self.remat and self.num_layers >= SCAN_FROM
        return deep if self.scan_layers is None else self.scan_layers

    @property
    def compiler_options(self) -> dict[str, bool]:
        """XLA options under which sampling and scoring round equally, however they are fused."""
        return {} if self.dtype == 'float32' else {'xla_allow_excess_precision': False}


def rope_frequencies(config: DecoderConfig) -> jax.Array:
    """Angle per position of each pair of channels, theta ** (-2i / Dh), float32 [Dh / 2].

    rope_scaling (factor, low, high, original_length) rescales them as in Llama 3.1. Waves longer
    than original_length / low are slowed by factor, and waves shorter than original_length / high
    are unchanged, with linear interpolation in between.
    """
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_scaling is None:
        return frequency
    factor, low, high, length = config.rope_scaling
    waves = length * frequency / (2 * math.pi)  # periods within the original length
    keep = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequency * (keep + (1 - keep) / factor)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + Dh / 2) of x [R, O, N, Dh] by angles float32 [R, O, Dh / 2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def matmul_transposed(kernel: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """Multiply x [N, in] by a kernel [out, in]; returns [N, out].

    XLA's CPU backend repacks the right factor of a product each time. With this order it repacks
    the few rows instead of the kernel. Without the barrier it would swap the factors back.
    """
    contracted = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(kernel, x, contracted, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(out).T


class _TransposedDense(nn.Module):
    """nn.Dense with a kernel [out, in]: x [N, in] -> [N, out]."""

    features: int
    use_bias: bool
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        zeros, size = nn.initializers.zeros_init(), (self.features, x.shape[-1])
        kernel = self.param('kernel', zeros, size, jnp.float32)
        out = matmul_transposed(kernel.astype(self.dtype), x.astype(self.dtype), self.dtype)
        if self.use_bias:
            bias = self.param('bias', zeros, (self.features,), jnp.float32)
            out += bias.astype(self.dtype)[None]
        return out


def dense(
    x: jax.Array,
    features: int,
    name: str,
    config: DecoderConfig,
    *,
    bias: bool = False,
    gain: float = 1.0,
) -> jax.Array:
    """Apply a dense layer, and its adapter if any: x [R, O, D] -> [R, O, features]."""
    init = nn.initializers.variance_scaling(gain, 'fan_in', 'truncated_normal')
    how = dict(use_bias=bias, dtype=config.dtype, name=name)
    if config.transposed:
        dense = _TransposedDense(features, **how)
    else:
        dense = nn.Dense(features, kernel_init=init, **how)
    # Use one token axis. With two, XLA's CPU backend transposes both factors of the kernel's
    # gradient and multiplies them slowly (48 ms against 11 for an MLP, 64 x 144 tokens, D = 64).
    flat = x.reshape(-1, x.shape[-1])
    out = dense(flat)
    if dense.has_variable('lora', 'lora_a'):  # models/lora.py
        a, b = (dense.get_variable('lora', name).astype(out.dtype) for name in ('lora_a', 'lora_b'))
        out += config.lora_scale * ((flat @ a) @ b)
    return out.reshape(*x.shape[:-1], features)


class Attention(nn.Module):
    """Grouped-query attention within rows, or against the rows of a cache."""

    config: DecoderConfig
    rows: NamedSharding | None = None  # layout of rows on a mesh

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project x [R, O, D] to q [R, O, H, Dh] and k, v [R, O, Kh, Dh], before rotation."""
        raise NotImplementedError

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: jax.Array, visible: AttentionMask, cached: Any, where: Any
    ) -> tuple[jax.Array, Any]:
        """x [R, O, D]; cached (k, v) [S, T, Kh * Dh] or None; returns (out [R, O, D], cached)."""
        c = self.config
        q, k, v = self.project(x)
        q, k = rotate(q, angles), rotate(k, angles)
        q = q.reshape(x.shape[:2] + (c.num_kv_heads, -1, c.head_dim))
        if visible.rest is not None:
            out = attend_units(q, k, v, visible, shards=shards_of(self.rows, len(x)))
        elif cached is None and c.fused:
            out = kernels.attend_rows(c.fused, q, k, v, visible.length, self.rows)
        elif cached is None:
            out = attend_rows(q, k, v, visible.mask, shards=shards_of(self.rows, len(x)))
        else:
            cached = (where.write(cached[0], k), where.write(cached[1], v))
            k, v = where.read(cached[0], k), where.read(cached[1], v)
            out = attend_cache(q, k, v, visible, c.fused)
        return dense(out, c.hidden_size, 'o_proj', c, gain=0.5 / c.num_layers), cached


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (arXiv:2002.05202)."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = dense(x, c.intermediate_size, 'gate_proj', c)
        up = dense(x, c.intermediate_size, 'up_proj', c)
        return dense(nn.silu(gate) * up, c.hidden_size, 'down_proj', c, gain=0.5 / c.num_layers)


class Layer(nn.Module):
    """x + after(attention(before(x))), then the same with the MLP."""

    config: DecoderConfig
    rows: NamedSharding | None = None  # layout of rows on a mesh

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        visible: AttentionMask,
        cached: Any = None,
        where: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Arguments and results are those of Attention."""
        c = self.config

        def norm(name, x):
            return c.norm(name)(x) if name else x

        (before, after), (before_mlp, after_mlp) = c.NORMS
        attention = c.ATTENTION(c, self.rows, name='self_attn')
        mixed, cached = attention(norm(before, x), angles, visible, cached, where)
        x = x + norm(after, mixed)
        return x + norm(after_mlp, MLP(c, name='mlp')(norm(before_mlp, x))), cached


class Backbone(nn.Module):
    """Embedding, layers and final norm: the model without its head."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        visible: AttentionMask,
        cache: Any = None,
        where: Any = None,
        row_sharding: NamedSharding | None = None,
    ) -> tuple[jax.Array, Any]:
        """tokens, positions int32 [R, O] -> (hidden [R, O, D], cache)."""
        c = self.config

        def pin(x):
            return jax.lax.with_sharding_constraint(x, row_sharding) if row_sharding else x

        embedding = self.param(
            'embedding', nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size), jnp.float32
        )
        if row_sharding:  # the look-up needs full vectors, or XLA splits it by channels
            unsplit = NamedSharding(row_sharding.mesh, P(P.UNCONSTRAINED, None))
            embedding = jax.lax.with_sharding_constraint(embedding, unsplit)
        x = pin(embedding[tokens].astype(c.dtype))
        angles = positions.astype(jnp.float32)[:, :, None] * rope_frequencies(c)[None, None]
        if c.scans and cache is None and not self.is_initializing():
            layer = Layer(c, row_sharding, parent=None)
            x = layer_scan.run(
                lambda variables, x: pin(layer.apply(variables, x, angles, visible)[0]),
                [
                    {kind: tree[f'layers_{i}'] for kind, tree in self.variables.items()}
                    for i in range(c.num_layers)
                ],
                x,
                dtype=c.dtype,
                remat=c.remat,
                mesh=row_sharding.mesh if row_sharding else None,
            )
            return RMSNorm(c.rms_norm_eps, c.dtype, name='norm')(x), None
        layer = nn.remat(Layer) if c.remat and cache is None else Layer
        keys, values = [], []
        for i in range(c.num_layers):
            cached = None if cache is None else (cache.k[i], cache.v[i])
            x, cached = layer(c, row_sharding, name=f'layers_{i}')(
                x, angles, visible, cached, where
            )
            x = pin(x)
            if cached is not None:
                keys.append(cached[0])
                values.append(cached[1])
        x = RMSNorm(c.rms_norm_eps, c.dtype, name='norm')(x)
        return x, None if cache is None else KVCache(tuple(keys), tuple(values))


@struct.dataclass
class Where:
    """Location of a block of tokens in the cache."""

    rows: jax.Array | None  # int32 [R], None = all rows in order
    positions: jax.Array  # int32 [R, O]
    kv_length: int = struct.field(pytree_node=False)

    def write(self, cache: jax.Array, new: jax.Array) -> jax.Array:
        """Write new [R, O, Kh, Dh] into cache [S, T, Kh * Dh] at (rows, positions)."""
        rows = jnp.arange(new.shape[0]) if self.rows is None else self.rows
        # Each (row, position) is unique, except for dropped ones.
        return cache.at[rows[:, None], self.positions].set(
            new.reshape(*new.shape[:2], -1).astype(cache.dtype), mode='drop', unique_indices=True
        )

    def read(self, cache: jax.Array, new: jax.Array) -> jax.Array:
        """Read the first kv_length entries of the rows, [R, kv_length, Kh, Dh], in new's dtype."""
        cache = cache[:, : self.kv_length]
        cache = cache if self.rows is None else cache[self.rows]
        return cache.astype(new.dtype).reshape(*cache.shape[:2], *new.shape[2:])


def shards_of(rows: NamedSharding | None, count: int) -> int:
    """Return the number of devices over which `count` rows are split."""
    return 1 if rows is None else count // rows.shard_shape((count,))[0]
