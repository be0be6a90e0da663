"""Qwen2.5 and its kin (Llama, Qwen3): Flax Linen modules behind pure functions.

Source: technical reports of Qwen2.5 (arXiv:2412.15115) and Qwen3 (arXiv:2505.09388), transformers'
modeling_qwen2 and modeling_qwen3. Parameters are a nested dict of float32 masters whose paths
mirror HuggingFace's names; kernels are [in, out]. They are cast to config.dtype where they are
used; norms, rotary angles and softmax stay in float32.

Letters: B or R rows, O or T tokens, S cache rows, D hidden, H query heads, Kh key-value heads,
G = H / Kh query heads per key-value head, Dh head width.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.models import layer_scan
from agentrl_jax.models.attention import attend_cache, attend_rows
from agentrl_jax.types import Params

SCAN_FROM = 8  # layers; fewer compile as fast one after another


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model and how it computes; hashable, so it can be a static argument."""

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
    qkv_bias: bool = True  # Qwen2.5; False: Llama and Qwen3
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of queries and keys, before rotation
    rope_scaling: tuple[float, float, float, float] | None = None  # Llama 3: see rope_frequencies
    dtype: str = 'float32'  # compute dtype
    lora_scale: float = 1.0  # alpha / rank, factor of the low-rank corrections in params['lora']
    remat: bool = False  # recompute each layer in the backward pass of forward()
    scan_layers: bool | None = None  # layers of forward() as one loop; None: see `scans`
    transposed: bool = False  # kernels are [out, in], as transpose_kernels makes them

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}'
            )
        if self.qkv_bias and self.qk_norm:
            raise ValueError('a model with both biases and norms of queries and keys is unknown')
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim} must be even for rotary positions')

    @property
    def scans(self) -> bool:
        """Where nothing but the border of a layer is kept for its gradient, a loop costs nothing.

        Otherwise it keeps one array several times and is slower (experiments/LOG.md).
        """
        deep = self.remat and self.num_layers >= SCAN_FROM
        return deep if self.scan_layers is None else self.scan_layers


@struct.dataclass
class KVCache:
    """Keys and values of S rows; index t of a row holds the token at position t."""

    k: tuple[jax.Array, ...]  # per layer [S, T, Kh, Dh], rotated
    v: tuple[jax.Array, ...]  # per layer [S, T, Kh, Dh]

    @property
    def length(self) -> int:
        return self.k[0].shape[1]


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Angle per position of each pair of channels, float32 [Dh / 2].

    theta ** (-2i / Dh). rope_scaling (factor, low, high, original_length) stretches them as Llama
    3.1 does: waves longer than original_length / low are slowed by factor, shorter than
    original_length / high kept, linear in between.
    """
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_scaling is None:
        return frequency
    factor, low, high, length = config.rope_scaling
    waves = length * frequency / (2 * math.pi)  # periods that fit into the original length
    keep = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequency * (keep + (1 - keep) / factor)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + Dh / 2) of x [R, O, N, Dh] by angles float32 [R, O, Dh / 2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, computed in float32 (arXiv:1910.07467).

    nan where the mean leaves float32: 1 / sqrt(inf) would make zeros, and a model that has come
    apart would seem to be one that knows nothing.
    """

    eps: float
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param('scale', nn.initializers.ones_init(), (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        power = jnp.mean(x * x, axis=-1, keepdims=True) + self.eps
        x = x * jnp.where(power < jnp.inf, jax.lax.rsqrt(power), jnp.nan)
        # transformers rounds here, before the scale; so do we, to agree in bfloat16 as well
        x, scale = x.astype(self.dtype), scale.astype(self.dtype)
        return x * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def _times_rows(kernel: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """x [N, in] times a kernel [out, in]; [N, out].

    XLA's CPU backend packs the right factor of a product anew each time: here the few rows, in
    place of the kernel. Without the barrier it would swap them again.
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
        out = _times_rows(kernel.astype(self.dtype), x.astype(self.dtype), self.dtype)
        if self.use_bias:
            bias = self.param('bias', zeros, (self.features,), jnp.float32)
            out += bias.astype(self.dtype)[None]
        return out


def _dense(x, features: int, name: str, config: ModelConfig, *, bias: bool = False, gain=1.0):
    """x [R, O, D] -> [R, O, features]."""
    init = nn.initializers.variance_scaling(gain, 'fan_in', 'truncated_normal')
    how = dict(use_bias=bias, dtype=config.dtype, name=name)
    if config.transposed:
        dense = _TransposedDense(features, **how)
    else:
        dense = nn.Dense(features, kernel_init=init, **how)
    # One token axis: with two, XLA's CPU backend transposes both factors of the kernel's gradient
    # and multiplies them slowly (48 ms against 11 for the MLP of 64 x 144 tokens, D = 64).
    flat = x.reshape(-1, x.shape[-1])
    out = dense(flat)
    if dense.has_variable('lora', 'lora_a'):  # models/lora.py
        a, b = (dense.get_variable('lora', name).astype(out.dtype) for name in ('lora_a', 'lora_b'))
        out += config.lora_scale * ((flat @ a) @ b)
    return out.reshape(*x.shape[:-1], features)


class Attention(nn.Module):
    """Grouped-query attention; with a cache, its keys and values are those of the cache rows."""

    config: ModelConfig
    shards: int = 1

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        mask: jax.Array,
        cached: tuple[jax.Array, jax.Array] | None = None,
        where: Any = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """x [R, O, D]; cached (k, v) [S, T, Kh, Dh]; returns (out [R, O, D], cached)."""
        c = self.config
        heads = x.shape[:2] + (-1, c.head_dim)
        q = _dense(x, c.num_heads * c.head_dim, 'q_proj', c, bias=c.qkv_bias).reshape(heads)
        k = _dense(x, c.num_kv_heads * c.head_dim, 'k_proj', c, bias=c.qkv_bias).reshape(heads)
        v = _dense(x, c.num_kv_heads * c.head_dim, 'v_proj', c, bias=c.qkv_bias).reshape(heads)
        if c.qk_norm:
            q = RMSNorm(c.rms_norm_eps, c.dtype, name='q_norm')(q)
            k = RMSNorm(c.rms_norm_eps, c.dtype, name='k_norm')(k)
        q, k = rotate(q, angles), rotate(k, angles)
        q = q.reshape(x.shape[:2] + (c.num_kv_heads, -1, c.head_dim))
        if cached is not None:
            cached = (where.write(cached[0], k), where.write(cached[1], v))
            k, v = where.read(cached[0], k.dtype), where.read(cached[1], v.dtype)
        if cached is None:
            out = attend_rows(q, k, v, mask, shards=self.shards)
        else:
            out = attend_cache(q, k, v, mask)
        return _dense(out, c.hidden_size, 'o_proj', c, gain=0.5 / c.num_layers), cached


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (arXiv:2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = _dense(x, c.intermediate_size, 'gate_proj', c)
        up = _dense(x, c.intermediate_size, 'up_proj', c)
        return _dense(nn.silu(gate) * up, c.hidden_size, 'down_proj', c, gain=0.5 / c.num_layers)


class Layer(nn.Module):
    """Pre-norm residual block."""

    config: ModelConfig
    shards: int = 1  # devices over which the rows are split

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        mask: jax.Array,
        cached: tuple[jax.Array, jax.Array] | None = None,
        where: Any = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        norm = dict(eps=self.config.rms_norm_eps, dtype=self.config.dtype)
        mixed, cached = Attention(self.config, self.shards, name='self_attn')(
            RMSNorm(**norm, name='input_layernorm')(x), angles, mask, cached, where
        )
        x = x + mixed
        x = x + MLP(self.config, name='mlp')(RMSNorm(**norm, name='post_attention_layernorm')(x))
        return x, cached


class Backbone(nn.Module):
    """Embedding, layers and final norm; everything but the head."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Any = None,
        where: Any = None,
        row_sharding: NamedSharding | None = None,
    ) -> tuple[jax.Array, Any]:
        """tokens, positions int32 [R, O], mask bool [R, O, T] -> (hidden [R, O, D], cache)."""
        c = self.config

        def pin(x):
            return jax.lax.with_sharding_constraint(x, row_sharding) if row_sharding else x

        embedding = self.param(
            'embedding', nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size), jnp.float32
        )
        if row_sharding:  # the look-up needs whole vectors, or else it is split by channels
            whole = NamedSharding(row_sharding.mesh, P(P.UNCONSTRAINED, None))
            embedding = jax.lax.with_sharding_constraint(embedding, whole)
        x = pin(embedding[tokens].astype(c.dtype))
        angles = positions.astype(jnp.float32)[:, :, None] * rope_frequencies(c)[None, None]
        shards = row_sharding.shard_shape(tokens.shape) if row_sharding else tokens.shape
        shards = tokens.shape[0] // shards[0]
        if c.scans and cache is None and not self.is_initializing():
            layer = Layer(c, shards, parent=None)
            x = layer_scan.run(
                lambda variables, x: pin(layer.apply(variables, x, angles, mask)[0]),
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
            x, cached = layer(c, shards, name=f'layers_{i}')(x, angles, mask, cached, where)
            x = pin(x)
            if cached is not None:
                keys.append(cached[0])
                values.append(cached[1])
        x = RMSNorm(c.rms_norm_eps, c.dtype, name='norm')(x)
        return x, None if cache is None else KVCache(tuple(keys), tuple(values))


@struct.dataclass
class _Where:
    """Where a block of tokens lives in the cache."""

    rows: jax.Array | None  # int32 [R], None = all rows in order
    positions: jax.Array  # int32 [R, O]
    kv_length: int = struct.field(pytree_node=False)

    def write(self, cache: jax.Array, new: jax.Array) -> jax.Array:
        """cache [S, T, Kh, Dh] with new [R, O, Kh, Dh] at (rows, positions)."""
        rows = jnp.arange(new.shape[0]) if self.rows is None else self.rows
        # No (row, position) comes twice, except those that are dropped.
        return cache.at[rows[:, None], self.positions].set(
            new.astype(cache.dtype), mode='drop', unique_indices=True
        )

    def read(self, cache: jax.Array, dtype) -> jax.Array:
        """The first kv_length entries of the rows, [R, kv_length, Kh, Dh]."""
        cache = cache[:, : self.kv_length]
        return (cache if self.rows is None else cache[self.rows]).astype(dtype)


def _variables(params: Params) -> dict:
    model = dict(params['model'])
    model['embedding'] = model.pop('embed_tokens')['embedding']
    return {'params': model} | {name: params[name] for name in ('lora',) if name in params}


def init(key: jax.Array, config: ModelConfig) -> Params:
    """Random float32 parameters: fan-in scaled kernels, residual outputs over sqrt(2 L)."""
    k_model, k_head = jax.random.split(key)
    one = jnp.zeros((1, 1), jnp.int32)
    model = Backbone(config).init(k_model, one, one, jnp.ones((1, 1, 1), bool))['params']
    model = dict(model)
    model['embed_tokens'] = {'embedding': model.pop('embedding')}
    params = {'model': model}
    if not config.tie_embeddings:
        shape = (config.hidden_size, config.vocab_size)
        params['lm_head'] = {'kernel': 0.02 * jax.random.normal(k_head, shape, jnp.float32)}
    return params


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
    *,
    row_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Final hidden states [B, T, D] of whole rows, in the compute dtype.

    tokens, positions int32 [B, T]; attention_mask bool [B, T] marks real tokens. Token t attends to
    the real tokens at indices <= t; results at padding are finite and mean nothing. row_sharding
    keeps activations split by rows; without it XLA may split them by channels, like the parameters,
    and hold all rows on every device.
    """
    index = jnp.arange(tokens.shape[1])
    causal = index[:, None] >= index[None, :]
    mask = causal[None] & attention_mask[:, None, :]
    hidden, _ = Backbone(config).apply(
        _variables(params), tokens, positions, mask, row_sharding=row_sharding
    )
    return hidden


def init_cache(config: ModelConfig, rows: int, length: int, dtype: str | None = None) -> KVCache:
    """An empty cache of `rows` rows and `length` positions; dtype None = compute dtype."""
    shape = (rows, length, config.num_kv_heads, config.head_dim)
    dtype = config.dtype if dtype is None else dtype
    layers = range(config.num_layers)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in layers),
        v=tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


def forward_cached(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    rows: jax.Array | None,
    *,
    kv_length: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """Runs a block of tokens behind what the cache holds; returns (hidden [R, O, D], cache).

    tokens, positions int32 [R, O]. Keys and values are written at (rows, positions), each pair at
    most once; positions >= T and rows >= S are padding and dropped. A token attends to the entries
    at indices <= its position, so rows must be contiguous: index = position. rows int32 [R], or
    None for all rows in order. kv_length (static) promises that all positions in use are below it:
    only that prefix is read.
    """
    length = cache.k[0].shape[1]
    last = jnp.where(positions < length, positions, 0)  # padding sees one entry and costs nothing
    length = length if kv_length is None else min(kv_length, length)
    mask = jnp.arange(length)[None, None, :] <= last[:, :, None]
    where = _Where(rows=rows, positions=positions, kv_length=length)
    return Backbone(config).apply(_variables(params), tokens, positions, mask, cache, where)


def transpose_kernels(params: Params) -> Params:
    """The parameters for a config with `transposed`: every kernel [out, in]; no adapters.

    In a program, once for all products in its loops: few rows are then multiplied faster on a CPU,
    where a model is larger than its caches (benchmarks/README.md).
    """

    def turn(path, x):
        return x.T if path[-1].key == 'kernel' else x

    # Without the barrier XLA makes the transpose a part of each product again.
    return jax.lax.optimization_barrier(jax.tree_util.tree_map_with_path(turn, params))


def head_kernel(params: Params, config: ModelConfig) -> jax.Array:
    """The output head [D, V]: lm_head, or the embedding transposed."""
    if config.tie_embeddings:
        return params['model']['embed_tokens']['embedding'].T
    return params['lm_head']['kernel']


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """float32 [..., V] from hidden [..., D]; the product runs in the compute dtype."""
    if config.transposed:
        tied = config.tie_embeddings
        head = params['model']['embed_tokens']['embedding'] if tied else params['lm_head']['kernel']
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = _times_rows(head.astype(config.dtype), flat, jnp.float32)
        return out.reshape(*hidden.shape[:-1], -1)
    head = head_kernel(params, config).astype(config.dtype)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def param_count(config: ModelConfig) -> int:
    """Number of parameters, without allocating them."""
    shapes = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
