"""Token sampling: temperature, top-k, top-p and greedy, with one uniform number per row.

Tokens are drawn by inverting the cumulative distribution in two levels: over blocks of the
vocabulary, then inside a block. Each row needs a single random number, while Gumbel-max needs V.
The draw of a row depends only on its key and logits, not on the other rows of the batch or on its
device.

If the vocabulary is split over devices (mesh.tensor > 1), each block is on a single device. Devices
exchange the largest logit and the block sums, [S, V / 128], and then the block [S, 128] that
contains the token. Logits are not moved.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

BLOCK = 128  # vocabulary entries per block of the two-level draw


def threshold(weights: jax.Array, amount: jax.Array, target: jax.Array) -> jax.Array:
    """Return the largest t per row with sum(amount where weights >= t) >= target, without a sort.

    Bisects the bit patterns, which order like non-negative floats: 31 halvings find t exactly.
    weights, amount float32 [S, V]; target float32 [S]; returns float32 [S].
    """
    low = jnp.zeros(weights.shape[0], jnp.int32)
    high = jnp.full(weights.shape[0], 0x7F800000, jnp.int32)  # +inf

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        cut = jax.lax.bitcast_convert_type(middle, jnp.float32)
        reached = jnp.sum(jnp.where(weights >= cut[:, None], amount, 0.0), axis=1) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def truncate(weights: jax.Array, *, top_k: int, top_p: float | jax.Array) -> jax.Array:
    """Keep the top_k largest weights (0 = all), and the smallest subset of them with mass top_p.

    weights float32 [S, V], not normalised; top_p: one value, or float32 [S] per row. Ties at the
    threshold are kept, so both sets may be larger.
    """
    if 0 < top_k < weights.shape[1]:
        target = jnp.full(weights.shape[0], top_k, jnp.float32)
        cut = threshold(weights, jnp.ones_like(weights), target)
        weights = jnp.where(weights >= cut[:, None], weights, 0.0)
    if isinstance(top_p, jax.Array) or top_p < 1.0:
        cut = threshold(weights, weights, top_p * weights.sum(1))
        cut = jnp.where(top_p < 1.0, cut, 0.0)
        weights = jnp.where(weights >= cut[:, None], weights, 0.0)
    return weights


def entries(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[s, index[s]] for x [S, N, ...] and index int32 [S]."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def invert(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index with a cumulative weight above the target, and the remaining target.

    The remaining target is relative to the start of that entry. weights float32 [S, N], target
    float32 [S]; returns int32 [S] and float32 [S].
    """
    upper = jnp.cumsum(weights, axis=1)
    index = jnp.sum(upper <= target[:, None], axis=1)
    # Rounding can push the target past the last sum; use the entry with the largest weight then.
    index = jnp.where(index == weights.shape[1], jnp.argmax(weights, axis=1), index)
    return index, jnp.maximum(target - entries(upper - weights, index), 0.0)


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float | jax.Array = 1.0,
    vocab_shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Return the next token of each row and its log-probability under the sampling distribution.

    logits float32 [S, V], uniform float32 [S] in [0, 1). temperature 0 is greedy, with the
    log-probability at temperature 1. Returns int32 [S] and float32 [S]. If a logit is nan or inf,
    the log-probability is nan and the token is meaningless.

    Logits are read twice, for the maximum and the sum of each block. No array of their size is
    written, except with top-k or top-p, because the block with the token is exponentiated again.

    vocab_shards: number of equal parts of the vocabulary, one per device of a mesh. With several,
    sums are computed in another order. top-k and top-p exchange one sum per row and halving.
    """
    scores = logits / temperature if temperature > 0 else logits
    rows, vocab = scores.shape
    if temperature > 0 and (top_k or isinstance(top_p, jax.Array) or top_p < 1.0):
        weights = jnp.exp(scores - scores.max(1, keepdims=True))
        in_support = truncate(weights, top_k=top_k, top_p=top_p) > 0
        scores = jnp.where(in_support, scores, -jnp.inf)
    shards = (
        1 if vocab % vocab_shards else vocab_shards
    )  # sharding.specs does not split such a head
    rest = -(vocab // shards) % BLOCK  # padding of a shard's last block
    if shards > 1:
        scores = scores.reshape(rows, shards, -1)
    pad = [(0, 0)] * (scores.ndim - 1) + [(0, rest)]
    scores = jnp.pad(scores, pad, constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    highest = scores.max(2)  # [S, blocks]
    top = highest.max(1)
    mass = jnp.exp(scores - top[:, None, None]).sum(2)  # [S, blocks]
    if shards > 1:
        highest, mass = jax.lax.with_sharding_constraint((highest, mass), P())
    total = jnp.cumsum(mass, axis=1)[:, -1]
    if temperature == 0:
        block = jnp.argmax(highest, axis=1)
        index = jnp.argmax(entries(scores, block), axis=1)
    else:
        block, target = invert(mass, uniform * total)
        index, _ = invert(jnp.exp(entries(scores, block) - top[:, None]), target)
    chosen = entries(entries(scores, block), index)
    token = (block * BLOCK + index).astype(jnp.int32)
    if shards > 1:  # subtract the padding of the previous shards
        token -= block // (scores.shape[1] // shards) * rest
    return token, chosen - top - jnp.log(total)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Settings of `sample`. A subclass may choose tokens in another way."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0

    def draw(
        self, slots: Any, logits: jax.Array, uniform: jax.Array, *, vocab_shards: int = 1
    ) -> tuple[jax.Array, jax.Array]:
        """Return the next token of each slot and its log-probability: int32 [S], float32 [S].

        slots: the state of the rollout, which this sampler does not use.
        """
        del slots
        settings = dict(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        return sample(logits, uniform, **settings, vocab_shards=vocab_shards)
