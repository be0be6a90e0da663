"""A model as the rest of the package knows it: sizes, how it computes, functions of its parameters.

A family is one file with a frozen dataclass that derives from `decoder.Decoder` (or from Model, if
it shares nothing with other decoders), and one line in FAMILIES (__init__.py). Parameters are a
nested dict of float32 masters whose paths mirror HuggingFace's names; kernels are [in, out].
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from agentrl_jax.types import Params

SCAN_FROM = 8  # layers; fewer compile as fast one after another


@struct.dataclass
class KVCache:
    """Keys and values of S rows; index t of a row holds the token at position t."""

    # Heads side by side: a TPU would pad each to 128 channels, and copy the cache to read it
    k: tuple[jax.Array, ...]  # per layer [S, T, Kh * Dh], rotated
    v: tuple[jax.Array, ...]  # per layer [S, T, Kh * Dh]

    @property
    def length(self) -> int:
        return self.k[0].shape[1]


@dataclasses.dataclass(frozen=True)
class Model(abc.ABC):
    """Sizes and computation of a model; hashable, so it can be a static argument."""

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
    lora_scale: float = 1.0  # alpha / rank, factor of the low-rank corrections in params['lora']
    remat: bool = False  # recompute each layer in the backward pass of forward()
    scan_layers: bool | None = None  # layers of forward() as one loop; None: see `scans`
    transposed: bool = False  # kernels are [out, in], as transpose_kernels makes them
    fused: str = ''  # whose attention kernels: 'cudnn', 'pallas' or '' (none); kernels.kind_for

    GGUF_LAYER: ClassVar[
        Mapping[str, str]
    ]  # norms of a layer: name in GGUF files, here and in HF's

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}'
            )
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim} must be even for rotary positions')

    # What files say of a model.

    @classmethod
    @abc.abstractmethod
    def options(cls, kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of this family alone, of files whose model_type (or GGUF architecture) is kind.

        hf: config.json, {} of a GGUF file. A ValueError refuses variants that are not supported.
        """

    @abc.abstractmethod
    def to_hf(self, *, generic: bool = False) -> dict[str, Any]:
        """model_type and the fields of this family alone, for config.json.

        generic: beside a tokenizer that is not one of the family's own.
        """

    # Functions of parameters.

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Params:
        """Random float32 parameters."""

    @abc.abstractmethod
    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attention_mask: jax.Array,
        *,
        row_sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """Final hidden states [B, T, D] of whole rows, in the compute dtype.

        tokens, positions int32 [B, T]; attention_mask bool [B, T] marks real tokens, which come
        first in every row. Token t attends to the real tokens at indices <= t; results at padding
        are finite and mean nothing.
        row_sharding keeps activations split by rows; without it XLA may split them by channels,
        like the parameters, and hold all rows on every device.
        """

    @abc.abstractmethod
    def forward_units(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        lead: jax.Array,
        rest: jax.Array,
        *,
        row_sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """forward() of units, hidden states [n, O, D]: prefixes.Packed says what its arrays are.

        By no fused kernel; results of a token that sees none mean nothing.
        """

    @abc.abstractmethod
    def forward_cached(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        rows: jax.Array | None,
        *,
        kv_length: int | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Runs a block of tokens after what the cache holds; returns (hidden [R, O, D], cache).

        tokens, positions int32 [R, O]. Keys and values are written at (rows, positions), each pair
        at most once; positions >= T and rows >= S are padding and dropped. A token attends to the
        entries at indices <= its position, so rows must be contiguous: index = position. rows int32
        [R], or None for all rows in order. kv_length (static) promises that all positions in use
        are below it: only that prefix is read.
        """

    # The same for every family.

    @property
    def scans(self) -> bool:
        """Where nothing but the border of a layer is kept for its gradient, a loop costs nothing.

        Otherwise it keeps one array several times and is slower (experiments/LOG.md).
        """
        deep = self.remat and self.num_layers >= SCAN_FROM
        return deep if self.scan_layers is None else self.scan_layers

    def init_cache(self, rows: int, length: int, dtype: str | None = None) -> KVCache:
        """An empty cache of `rows` rows and `length` positions; dtype None = compute dtype."""
        shape = (rows, length, self.num_kv_heads * self.head_dim)
        zeros = functools.partial(jnp.zeros, shape, self.dtype if dtype is None else dtype)
        layers = range(self.num_layers)
        return KVCache(k=tuple(zeros() for _ in layers), v=tuple(zeros() for _ in layers))

    def head_kernel(self, params: Params) -> jax.Array:
        """The output head [D, V]: lm_head, or the embedding transposed."""
        if self.tie_embeddings:
            return params['model']['embed_tokens']['embedding'].T
        return params['lm_head']['kernel']

    def head_columns(self, params: Params, columns: jax.Array) -> jax.Array:
        """[D, U] in the compute dtype: the head of the tokens columns int32 [U] alone."""
        return self.head_kernel(params)[:, columns].astype(self.dtype)

    def logits(self, params: Params, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
        """float32 [..., V] from hidden [..., D]; the product runs in the compute dtype.

        head [D, U]: that of some tokens alone (head_columns), for [..., U].
        """
        if head is not None:
            return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        if self.transposed:  # the head is [V, D] then, as the embedding always is
            embedding = params['model']['embed_tokens']['embedding']
            head = embedding if self.tie_embeddings else params['lm_head']['kernel']
            out = times_rows(
                head.astype(self.dtype), hidden.reshape(-1, hidden.shape[-1]), jnp.float32
            )
            return out.reshape(*hidden.shape[:-1], -1)
        head = self.head_kernel(params).astype(self.dtype)
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

    def abstract_params(self) -> Params:
        """The parameter tree as shapes."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def param_count(self) -> int:
        """Number of parameters, without allocating them."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_params()))


def times_rows(kernel: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """x [N, in] times a kernel [out, in]; [N, out].

    XLA's CPU backend packs the right factor of a product anew each time: here the few rows, in
    place of the kernel. Without the barrier it would swap them again.
    """
    contracted = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(kernel, x, contracted, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(out).T


def transpose_kernels(params: Params) -> Params:
    """The parameters for a model with `transposed`: every kernel [out, in]; no adapters.

    In a program, once for all products in its loops: few rows are then multiplied faster on a CPU,
    where a model is larger than its caches (benchmarks/README.md).
    """

    def turn(path, x):
        return x.T if path[-1].key == 'kernel' else x

    # Without the barrier XLA makes the transpose a part of each product again.
    return jax.lax.optimization_barrier(jax.tree_util.tree_map_with_path(turn, params))
