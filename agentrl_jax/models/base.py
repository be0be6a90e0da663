"""A model: its sizes, compute options and functions of its parameters.

A family is one file with a frozen dataclass that derives from Model, and one line in FAMILIES
(__init__.py). Parameters are a nested dict of float32 masters with paths that mirror HuggingFace's
names; kernels are [in, out].
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from agentrl_jax.models.attention import AttentionMask
from agentrl_jax.models.decoder import Backbone, DecoderConfig, KVCache, Where, matmul_transposed
from agentrl_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Model(DecoderConfig, abc.ABC):
    """Sizes and computation of a model; hashable, so it can be a static argument."""

    # Reading and writing files.

    @classmethod
    @abc.abstractmethod
    def options(cls, kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the family-specific fields; kind is the model_type or GGUF architecture.

        hf: config.json, or {} for a GGUF file. Raise ValueError for unsupported variants.
        """

    @abc.abstractmethod
    def to_hf(self, *, generic: bool = False) -> dict[str, Any]:
        """Return model_type and the family-specific fields for config.json.

        generic: the tokenizer in the folder is not the family's own.
        """

    # Functions of parameters.

    def init(self, key: jax.Array) -> Params:
        """Random float32 parameters: fan-in scaled kernels, residual outputs / sqrt(2 L)."""
        k_model, k_head = jax.random.split(key)
        one = jnp.zeros((1, 1), jnp.int32)
        visible = AttentionMask(jnp.ones((1, 1, 1), bool), jnp.ones(1, jnp.int32))
        model = dict(Backbone(self).init(k_model, one, one, visible)['params'])
        model['embed_tokens'] = {'embedding': model.pop('embedding')}
        params = {'model': model}
        if not self.tie_embeddings:
            shape = (self.hidden_size, self.vocab_size)
            params['lm_head'] = {'kernel': 0.02 * jax.random.normal(k_head, shape, jnp.float32)}
        return params

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attention_mask: jax.Array,
        *,
        row_sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """Final hidden states [B, T, D] of full rows, in the compute dtype.

        tokens, positions int32 [B, T]; attention_mask bool [B, T] marks real tokens, which precede
        padding. Token t attends to the real tokens at indices <= t. Results at padding are finite
        but meaningless.
        row_sharding keeps activations split by rows. Without it XLA may split them by channels,
        like the parameters, and hold all rows on every device.
        """
        index = jnp.arange(tokens.shape[1])
        causal = index[:, None] >= index[None, :]
        visible = AttentionMask(causal[None] & attention_mask[:, None, :], attention_mask.sum(1))
        return self._apply(params, tokens, positions, visible, row_sharding=row_sharding)[0]

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
        """forward() for units, hidden states [n, O, D]; the arrays are those of prefixes.Packed.

        Never uses fused kernels. Results of a token that attends to no token are meaningless.
        """
        visible = AttentionMask(lead, rest=rest)
        return self._apply(params, tokens, positions, visible, row_sharding=row_sharding)[0]

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
        """Run a block of tokens after the cached ones; return (hidden [R, O, D], cache).

        tokens, positions int32 [R, O]. Keys and values are written at (rows, positions), each pair
        at most once; positions >= T and rows >= S are padding and dropped. A token attends to the
        entries at indices <= its position, so rows must be contiguous: index = position. rows int32
        [R], or None for all rows in order. kv_length (static): only this prefix is read; all
        positions in use must be below it.
        """
        length = cache.length
        last = jnp.where(positions < length, positions, 0)  # padding attends to one entry only
        length = length if kv_length is None else min(kv_length, length)
        mask = jnp.arange(length)[None, None, :] <= last[:, :, None]
        visible = AttentionMask(mask, last[:, -1] + 1)
        where = Where(rows=rows, positions=positions, kv_length=length)
        return self._apply(params, tokens, positions, visible, cache, where)

    def _apply(self, params: Params, *args: Any, **options: Any) -> tuple[jax.Array, Any]:
        """Apply the Backbone to its arguments."""
        model = dict(params['model'])
        model['embedding'] = model.pop('embed_tokens')['embedding']
        lora = {name: params[name] for name in ('lora',) if name in params}
        return Backbone(self).apply({'params': model} | lora, *args, **options)

    def init_cache(self, rows: int, length: int, dtype: str | None = None) -> KVCache:
        """Return an empty cache of `rows` rows and `length` positions; dtype None = compute."""
        shape = (rows, length, self.num_kv_heads * self.head_dim)
        zeros = functools.partial(jnp.zeros, shape, self.dtype if dtype is None else dtype)
        layers = range(self.num_layers)
        return KVCache(k=tuple(zeros() for _ in layers), v=tuple(zeros() for _ in layers))

    def head_kernel(self, params: Params) -> jax.Array:
        """Return the output head [D, V]: lm_head, or the embedding transposed."""
        if self.tie_embeddings:
            return params['model']['embed_tokens']['embedding'].T
        return params['lm_head']['kernel']

    def head_columns(self, params: Params, columns: jax.Array) -> jax.Array:
        """Return the head for the tokens `columns` int32 [U] only, [D, U] in the compute dtype."""
        return self.head_kernel(params)[:, columns].astype(self.dtype)

    def logits(self, params: Params, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
        """Return float32 [..., V] from hidden [..., D]; the product runs in the compute dtype.

        head [D, U]: restrict to some tokens (head_columns); returns [..., U].
        """
        if head is not None:
            return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        if self.transposed:  # the head is [V, D], like the embedding
            embedding = params['model']['embed_tokens']['embedding']
            head = embedding if self.tie_embeddings else params['lm_head']['kernel']
            out = matmul_transposed(
                head.astype(self.dtype), hidden.reshape(-1, hidden.shape[-1]), jnp.float32
            )
            return out.reshape(*hidden.shape[:-1], -1)
        head = self.head_kernel(params).astype(self.dtype)
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

    def abstract_params(self) -> Params:
        """Return the parameter tree as shapes."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def param_count(self) -> int:
        """Return the number of parameters without allocating them."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_params()))


def transpose_kernels(params: Params) -> Params:
    """Return the parameters for a model with `transposed`: every kernel [out, in]; no adapters.

    A program does this once, before its loops. Products with few rows are then faster on a CPU if
    the model is larger than its caches (benchmarks/README.md).
    """

    def turn(path, x):
        return x.T if path[-1].key == 'kernel' else x

    # Without the barrier XLA fuses the transpose into each product again.
    return jax.lax.optimization_barrier(jax.tree_util.tree_map_with_path(turn, params))
