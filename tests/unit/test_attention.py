"""Attention by hand and against a naive loop; decoding with a cache equals the full forward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, forward, random_params, rows

from agentrl_jax.models import attention


@functools.partial(jax.jit, static_argnums=1, static_argnames='kv_length')
def cached(params, config, *block, **how):
    return config.forward_cached(params, *block, **how)


def test_attention_by_hand():
    # One query head of width 1, keys log 1 and log 3: weights 1/4 and 3/4 of values 8 and 4 -> 5.
    q = jnp.ones((1, 2, 1, 1, 1))
    k = jnp.log(jnp.array([1.0, 3.0])).reshape(1, 2, 1, 1)
    v = jnp.array([8.0, 4.0]).reshape(1, 2, 1, 1)
    mask = jnp.array([[[True, False], [True, True]]])
    np.testing.assert_allclose(attention.attend(q, k, v, mask).reshape(-1), [8.0, 5.0], rtol=1e-6)


def test_grouped_heads_share_keys_in_order():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 5, 2, 3, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 5, 2, 4)).astype(np.float32)
    mask = np.tril(np.ones((5, 5), bool))
    out = np.asarray(attention.attend(q, k, v, jnp.asarray(mask)[None])).reshape(2, 5, 2, 3, 4)
    for b, t, head, member in np.ndindex(2, 5, 2, 3):
        scores = k[b, : t + 1, head] @ q[b, t, head, member] / 2.0
        weight = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(out[b, t, head, member], weight @ v[b, : t + 1, head], atol=1e-5)


def ragged_decode(params, config, tokens, lengths, cache_rows, kv_length):
    """Prefill rows in two chunks into scattered cache rows, then decode row by row to the end.

    Return hidden [B, T, D], collected step by step.
    """
    batch, width = tokens.shape
    slots = 5
    cache = config.init_cache(slots, width)
    collected = np.zeros((batch, width, config.hidden_size), np.float32)

    @jax.jit
    def block(cache, tokens, positions):
        return cached(params, config, tokens, positions, cache, cache_rows)

    for low, high in ((0, 3), (3, 7)):  # prompt chunks; shorter rows are padded with T
        column = np.arange(low, high)[None]
        positions = np.where(column < lengths[:, None], column, width)
        hidden, cache = block(cache, tokens[:, low:high], jnp.asarray(positions))
        collected[:, low:high] = hidden

    @jax.jit
    def decode(cache, tokens, positions):  # all slots at once, as in a rollout
        return cached(params, config, tokens, positions, cache, None, kv_length=kv_length)

    at = np.minimum(lengths, 7)
    while (at < width).any():
        live = at < width
        token, position = np.zeros((slots, 1), np.int32), np.full((slots, 1), width, np.int32)
        token[cache_rows, 0] = np.where(
            live, tokens[np.arange(batch), np.minimum(at, width - 1)], 0
        )
        position[cache_rows, 0] = at
        hidden, cache = decode(cache, jnp.asarray(token), jnp.asarray(position))
        collected[live, at[live]] = np.asarray(hidden)[cache_rows[live], 0]
        at = at + live
    return collected


@pytest.mark.parametrize('kv_length', [None, 12])
def test_cached_blocks_and_ragged_decoding_equal_the_full_forward(kv_length):
    params = random_params(TINY)
    tokens, positions = rows(TINY)
    lengths, cache_rows = np.array([2, 5, 7]), np.array([4, 0, 2])
    full = forward(params, TINY, tokens, positions, jnp.ones(tokens.shape, bool))
    steps = ragged_decode(params, TINY, np.asarray(tokens), lengths, cache_rows, kv_length)
    ours, expected = (TINY.logits(params, jnp.asarray(h)) for h in (steps, full))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_padding_positions_and_rows_write_nothing():
    params = random_params(TINY)
    tokens, positions = rows(TINY, batch=2, length=4)
    cache = jax.tree.map(lambda x: x + 7.0, TINY.init_cache(3, 6))
    outside = jnp.full_like(positions, 6)
    _, after = cached(params, TINY, tokens, outside, cache, jnp.array([0, 2]))
    jax.tree.map(np.testing.assert_array_equal, cache, after)
    _, after = cached(params, TINY, tokens, positions, cache, jnp.array([3, 1]))
    for before, now in zip(cache.k, after.k, strict=True):
        np.testing.assert_array_equal(before[jnp.array([0, 2])], now[jnp.array([0, 2])])
        assert np.abs(now[1, :4] - 7.0).min() > 0 and (now[1, 4:] == 7.0).all()


@pytest.mark.parametrize('shards', [1, 2, 3])
def test_attention_in_row_slices_has_the_values_and_gradients_of_full_attention(
    shards, monkeypatch
):
    # 6 rows, or 3 (2) of each of 2 (3) devices; scores of a row: 4 x 6 heads x 5 x 7
    monkeypatch.setattr(attention, 'SCORE_BYTES', 2 * 4 * 6 * 5 * 7)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(6, 5, 2, 3, 4)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 6, 7, 2, 4)), jnp.float32)
    mask = jnp.asarray(rng.random((6, 5, 7)) < 0.6).at[:, :, 0].set(True)

    def run(attend):
        def total(q, k, v):
            return jnp.sum(jnp.sin(attend(q, k, v, mask)))

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)

    by_parts = functools.partial(attention.attend_rows, shards=shards)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        run(by_parts),
        run(attention.attend),
    )
    text = jax.jit(by_parts).lower(q, k, v, mask).compile().as_text()
    part = {1: 2, 2: 2, 3: 6}[shards]  # 2 of 6; 1 of each of 2; all 2 of each of 3
    assert f'f32[{part},2,3,5,7]' in text


def observation_masks(lengths, queries, width):
    """Return bool [R, queries, width] for `queries` tokens that end at lengths - 1."""
    last = jnp.array(lengths)[:, None] - queries + jnp.arange(queries)[None]
    return jnp.arange(width)[None, None] <= last[:, :, None]


def queries_and_cache(queries, monkeypatch):
    """Return random q, k and v of a cache of 21 entries: two blocks of 8 and one of 5."""
    monkeypatch.setattr(attention, 'BLOCK', 8)
    monkeypatch.setattr(attention, 'WIDE_BLOCK', 8)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(3, queries, 2, 3, 4)), jnp.float32)
    return q, *jnp.asarray(rng.normal(size=(2, 3, 21, 2, 4)), jnp.float32)


@pytest.mark.parametrize(
    ('attend', 'queries'),
    [(attention.attend_one, 1), (attention.attend_blocks, 1), (attention.attend_filled, 4)],
)
def test_queries_against_a_cache_equal_attention(attend, queries, monkeypatch):
    q, k, v = queries_and_cache(queries, monkeypatch)
    here, full = (jax.jit(lambda *rows, of=of: of(*rows)) for of in (attend, attention.attend))
    for lengths in ((queries, 5, 8), (9, queries, 16), (21, 20, 7)):
        mask = observation_masks(lengths, queries, 21)
        poisoned = jnp.where(mask[:, -1, :, None, None], k, 50.0)
        out = here(q, poisoned, v, mask)
        np.testing.assert_allclose(out, full(q, k, v, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('queries', [1, 4])
def test_longer_neighbours_do_not_change_a_row_by_a_bit(queries, monkeypatch):
    attend = attention.attend_blocks if queries == 1 else attention.attend_filled
    q, k, v = queries_and_cache(queries, monkeypatch)

    def first(others):
        return attend(q, k, v, observation_masks([5, others, others], queries, 21))[0]

    np.testing.assert_array_equal(first(4), first(20))


def test_observations_in_a_wide_cache_equal_the_full_forward():
    # 300 entries are more than 4 blocks of 64, and more than twice the 5 tokens per block
    params, width = random_params(TINY), 300
    tokens, positions = rows(TINY, batch=2, length=10)
    full = forward(params, TINY, tokens, positions, jnp.ones(tokens.shape, bool))
    cache = TINY.init_cache(2, width)
    first, cache = cached(params, TINY, tokens[:, :5], positions[:, :5], cache, None)
    second, _ = cached(params, TINY, tokens[:, 5:], positions[:, 5:], cache, None)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), full, rtol=0, atol=1e-5)


def decode_loop(params, config, cache, steps):
    """Decode all rows greedily, starting from token 0."""

    def step(t, carry):
        token, cache = carry
        hidden, cache = config.forward_cached(params, token, jnp.full_like(token, t), cache, None)
        return jnp.argmax(config.logits(params, hidden), -1).astype(jnp.int32), cache

    token = jnp.zeros((cache.k[0].shape[0], 1), jnp.int32)
    return jax.lax.fori_loop(0, steps, step, (token, cache))


def test_a_decode_loop_never_copies_its_cache():
    params, slots, length = random_params(TINY), 4, 500
    cache = TINY.init_cache(slots, length)

    def copies(**donation):
        loop = jax.jit(lambda cache: decode_loop(params, TINY, cache, 8), **donation)
        lines = loop.lower(cache).compile().as_text().splitlines()
        moved = [line for line in lines if ' copy(' in line or ' transpose(' in line]
        return [line for line in moved if f'[{slots},' in line and str(length) in line]

    assert len(copies()) == 2 * TINY.num_layers  # of the argument, once, before the loop
    assert not copies(donate_argnums=0)
