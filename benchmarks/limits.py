"""Measured limits of the device, and the minimum work of a decode step or an update.

A limit is max(bytes / copy bandwidth, FLOPs / matmul rate), the minimum time to move the bytes and
compute the products. Letters: N parameters, B rows, S cached tokens of a row, L layers, K key-value
heads, H heads, Dh head width, D hidden, V vocabulary, T tokens of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.models import Model
from benchmarks import common

SIZES = {'cpu': (2**26, 1536), 'other': (2**31, 8192)}  # bytes to copy, side of the matrices


@dataclasses.dataclass(frozen=True)
class Limits:
    bandwidth: float  # bytes read and written per second by a copy
    flops: float  # of a square matrix product in the given dtype

    def seconds(self, *, moved: float, flops: float) -> float:
        """Minimum time to move `moved` bytes and compute `flops` FLOPs."""
        return max(moved / self.bandwidth, flops / self.flops)


def measure(dtype: str = 'float32', repeats: int = 5) -> Limits:
    """Measure copy bandwidth and matmul rate of the default device, the best of `repeats`."""
    kind = 'cpu' if jax.default_backend() == 'cpu' else 'other'
    size, side = SIZES[kind]
    rounds = 8
    buffer = jnp.zeros(size // 4, jnp.float32)
    matrix = jax.random.normal(jax.random.key(0), (side, side), dtype) * side**-0.5

    @jax.jit
    def copy(x):
        return jax.lax.fori_loop(0, rounds, lambda _, x: x + 1.0, x)

    @jax.jit
    def multiply(x):
        return jax.lax.fori_loop(0, 2, lambda _, y: jnp.matmul(y, x), x)

    times = common.alternate(
        {'copy': lambda: copy(buffer), 'mul': lambda: multiply(matrix)}, repeats
    )
    return Limits(
        bandwidth=2 * size * rounds / min(times['copy']), flops=4 * side**3 / min(times['mul'])
    )


def body_params(config: Model) -> int:
    """Parameters that every token is multiplied with, excluding embedding and head."""
    vocabulary = config.vocab_size * config.hidden_size
    return config.param_count() - vocabulary * (1 if config.tie_embeddings else 2)


def head_params(config: Model) -> int:
    return config.vocab_size * config.hidden_size


def cache_bytes(config: Model, tokens: float, itemsize: int = 4) -> float:
    """L 2 K Dh itemsize for each cached token."""
    return tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim * itemsize


def attention_flops(config: Model, pairs: float) -> float:
    """4 L H Dh for each pair of a query and a key: scores and weighted values."""
    return 4 * config.num_layers * config.num_heads * config.head_dim * pairs


def decode_step(config: Model, rows: int, context: float, itemsize: int = 4) -> dict:
    """{moved, flops} of decoding one token in each of `rows` rows with `context` cached tokens.

    All weights and all caches are read once: N w + B S L 2 K Dh c; 2 N B products and attention.
    """
    used = body_params(config) + head_params(config)
    return {
        'moved': used * itemsize + cache_bytes(config, rows * context, itemsize),
        'flops': 2 * used * rows + attention_flops(config, rows * context),
    }


def prefill(config: Model, rows: int, new: int, behind: int = 0, itemsize: int = 4) -> dict:
    """{moved, flops} of reading `new` tokens per row in one block; `behind` tokens are cached.

    Weights and caches are read once, keys and values written; only the last token uses the head.
    """
    pairs = rows * (new * behind + new * (new + 1) / 2)
    used = body_params(config) + head_params(config)
    return {
        'moved': used * itemsize + cache_bytes(config, rows * (behind + new), itemsize),
        'flops': 2 * rows * (body_params(config) * new + head_params(config))
        + attention_flops(config, pairs),
    }


def generate(config: Model, rows: int, prompt: int, new: int, itemsize: int = 4) -> dict:
    """{moved, flops} of reading `prompt` tokens and sampling `new` tokens in each of `rows` rows.

    The last sampled token is not read; the head is used once per sampled token.
    """
    steps = [decode_step(config, rows, prompt + i + 1, itemsize) for i in range(new - 1)]
    first = prefill(config, rows, prompt, itemsize=itemsize)['flops']
    return {
        'moved': sum(step['moved'] for step in steps),
        'flops': sum(step['flops'] for step in steps) + first,
    }


def rollout(config: Model, rows: int, tokens: int, sampled: int, itemsize: int = 4) -> dict:
    """{moved, flops} of episodes in `rows` rows, with `sampled` of their `tokens` tokens in all.

    Sampled tokens are decoded in all rows at once, at the mean context; others are read in blocks,
    which moves nothing here.
    """
    context, read = tokens / rows / 2, tokens - sampled
    step, steps = decode_step(config, rows, context, itemsize), sampled / rows
    flops = 2 * body_params(config) * read + attention_flops(config, read * context)
    return {'moved': steps * step['moved'], 'flops': steps * step['flops'] + flops}


def update(config: Model, rows: int, length: int, trained: int) -> dict:
    """{moved, flops} of a gradient and an AdamW step; `trained` tokens per row use the head.

    Three times the forward products (6 N per token); causal attention has T (T + 1) / 2 pairs.
    AdamW reads and writes parameters and two moments, and reads the gradient: 7 N in float32.
    """
    tokens = rows * length
    dense = body_params(config) * tokens + head_params(config) * rows * trained
    pairs = rows * length * (length + 1) / 2
    return {
        'moved': 7.0 * 4 * config.param_count(),
        'flops': 6.0 * dense + 3.0 * attention_flops(config, pairs),
    }
