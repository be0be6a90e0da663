"""Choosing the next token: temperature, top-k, top-p, greedy; one uniform number per row.

Tokens are drawn by inverting the cumulative distribution in two levels (blocks of the vocabulary,
then inside one block). It needs one exponential and two short sums per row and a single random
number, where Gumbel-max needs V of them; the draw of a row depends on its own key and logits only,
so it does not matter which other rows are in the batch or on which device the row lives.
"""

import jax
import jax.numpy as jnp

BLOCK = 128  # vocabulary entries per block of the two-level draw


def threshold(weights: jax.Array, amount: jax.Array, target: jax.Array) -> jax.Array:
    """Largest t per row with sum(amount where weights >= t) >= target, by bisection without a sort.

    Non-negative floats order as their bit patterns, so 31 halvings find t exactly.
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


def truncate(weights: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """Keeps the top_k largest weights (0 = all) and of these the smallest set of mass top_p.

    weights float32 [S, V], not normalised. Ties at the cut are kept, so both sets may be larger.
    """
    if 0 < top_k < weights.shape[1]:
        target = jnp.full(weights.shape[0], top_k, jnp.float32)
        cut = threshold(weights, jnp.ones_like(weights), target)
        weights = jnp.where(weights >= cut[:, None], weights, 0.0)
    if top_p < 1.0:
        cut = threshold(weights, weights, top_p * weights.sum(1))
        weights = jnp.where(weights >= cut[:, None], weights, 0.0)
    return weights


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index i with probability weights[i] / sum(weights).

    weights float32 [S, V], uniform float32 [S] in [0, 1); returns int32 [S].
    """
    rows, vocab = weights.shape
    blocks = -(-vocab // BLOCK)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK - vocab))).reshape(rows, blocks, BLOCK)
    mass = padded.sum(2)  # [S, blocks]
    upper = jnp.cumsum(mass, axis=1)
    target = uniform * upper[:, -1]
    block = jnp.sum(upper <= target[:, None], axis=1)
    # Rounding can push the target past the last sum; the heaviest entry is then the answer.
    block = jnp.where(block == blocks, jnp.argmax(mass, axis=1), block)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]  # [S, BLOCK]
    below = jnp.take_along_axis(upper - mass, block[:, None], axis=1)[:, 0]
    rest = jnp.maximum(target - below, 0.0)
    index = jnp.sum(jnp.cumsum(inside, axis=1) <= rest[:, None], axis=1)
    index = jnp.where(index == BLOCK, jnp.argmax(inside, axis=1), index)
    return (block * BLOCK + index).astype(jnp.int32)


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Next token of each row and its log-probability under the distribution it was drawn from.

    logits float32 [S, V], uniform float32 [S] in [0, 1). temperature 0 is greedy (the
    log-probability is then the one at temperature 1). Returns int32 [S] and float32 [S].
    """
    scaled = logits / temperature if temperature > 0 else logits
    top = scaled.max(1)
    weights = jnp.exp(scaled - top[:, None])
    if temperature == 0:
        token = jnp.argmax(scaled, axis=1).astype(jnp.int32)
    else:
        weights = truncate(weights, top_k=top_k, top_p=top_p)
        token = draw(weights, uniform)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    return token, chosen - top - jnp.log(weights.sum(1))
