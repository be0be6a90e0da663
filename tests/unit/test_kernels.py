"""Attention kernels against plain attention: interpreted Pallas, and XLA instead of cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, random_params

from agentrl_jax.machine import sharding
from agentrl_jax.models import attention, kernels

WIDTH = 64
PLATFORM = jax.default_backend()
ON_CPU = PLATFORM == 'cpu'
KINDS = ('cudnn', 'pallas') if ON_CPU else (kernels.KINDS[PLATFORM],)
DTYPE, ATOL = ('float32', 3e-5) if ON_CPU else ('bfloat16', 3e-2)  # device kernels require bfloat16


@pytest.fixture(autouse=True)
def replace_missing_devices(monkeypatch):
    monkeypatch.setattr(kernels, 'CUDNN', 'xla' if ON_CPU else 'cudnn')
    monkeypatch.setattr(kernels, 'INTERPRET', ON_CPU)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), DTYPE)


def assert_close(result, expected, rtol=1e-5):
    def same(a, b):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol if ON_CPU else ATOL, ATOL)

    jax.tree.map(same, result, expected)


def queries_keys_values(rows, queries, keys, heads, members):
    q = draw(rows, queries, heads, members, WIDTH)
    k, v = (draw(rows, keys, heads, WIDTH, seed=seed) for seed in (1, 2))
    return q, k, v


def real_tokens(lengths, width):
    return jnp.arange(width)[None] < jnp.asarray(lengths)[:, None]


@pytest.mark.soak
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'heads, members, lengths, width',
    [
        (1, 1, (1,), 1),
        (2, 7, (1, 130, 257), 257),
        (1, 2, (0, 64), 64),
    ],
    ids=['one token', 'groups of seven', 'none'],
)
def test_full_rows_have_the_values_and_gradients_of_plain_attention(
    kind, heads, members, lengths, width
):
    rows, real = len(lengths), real_tokens(lengths, width)
    arrays = queries_keys_values(rows, width, width, heads, members)
    causal = jnp.tril(jnp.ones((width, width), bool))
    mask = causal[None] & real[:, None]

    def total(attend):
        def value(*arrays):
            out = jnp.where(real[:, :, None], attend(*arrays), 0)
            return jnp.sin(out.astype(jnp.float32)).sum(), out

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(*arrays)

    length = jnp.asarray(lengths)
    result = total(lambda *a: kernels.attend_rows(kind, *a, length, None))
    expected = total(lambda *a: attention.attend(*a, mask))
    assert_close(result, expected)


@pytest.mark.skipif(not ON_CPU, reason='of the call')
def test_cudnn_receives_rows_of_an_even_length(monkeypatch):
    lengths, attend = [], jax.nn.dot_product_attention

    def watched(q, *arrays, **options):
        lengths.append(q.shape[1])
        return attend(q, *arrays, **options)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', watched)
    out = kernels.attend_rows('cudnn', *queries_keys_values(1, 5, 5, 1, 1), jnp.asarray([5]), None)
    assert lengths == [6] and out.shape == (1, 5, WIDTH)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('heads, members, width', [(1, 1, 1), (2, 7, 300)])
def test_one_query_attends_to_its_cache_up_to_its_length(kind, heads, members, width):
    lengths = sorted({1, width, width // 2 + 1, min(width, 257)})
    q, k, v = queries_keys_values(len(lengths), 1, width, heads, members)
    visible = real_tokens(lengths, width)
    expected = attention.attend(q, k, v, visible[:, None])
    result = jax.jit(lambda *a: kernels.attend_one(kind, *a))(q, k, v, jnp.asarray(lengths))
    assert_close(result, expected)


@pytest.mark.skipif('pallas' not in KINDS, reason='of the Pallas kernel')
def test_entries_after_the_length_of_a_row_are_not_read():
    lengths, width = (1, 100, 256), 512
    q, k, v = queries_keys_values(3, 1, width, 2, 2)
    visible = real_tokens(lengths, width)[:, :, None, None]
    expected = kernels.attend_one('pallas', q, k, v, jnp.asarray(lengths))
    k, v = (jnp.where(visible, x, jnp.nan) for x in (k, v))
    result = kernels.attend_one('pallas', q, k, v, jnp.asarray(lengths))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.skipif(jax.device_count() < 8, reason='eight devices')
@pytest.mark.parametrize('tensor, count', [(2, 8), (1, 3)])
def test_on_a_mesh_each_device_has_its_rows_and_heads(tensor, count):
    mesh = sharding.make_mesh(2, 4 // tensor, tensor)
    rows = sharding.shard_rows(mesh)
    arrays = queries_keys_values(count, 128, 128, 2, 2)
    length = jnp.full(count, 128)
    alone = kernels.attend_rows('pallas', *arrays, length, None)
    split = jax.jit(lambda *a: kernels.attend_rows('pallas', *a, length, rows))(*arrays)
    np.testing.assert_allclose(split, alone, atol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize('kind', KINDS)
def test_a_model_gives_the_same_results_with_and_without_kernels(kind):
    plain = dataclasses.replace(TINY, head_dim=WIDTH, dtype=DTYPE)
    fused = dataclasses.replace(plain, fused=kind)
    params = random_params(plain)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, plain.vocab_size, (3, 9)))
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    real = real_tokens((9, 4, 1), 9)

    def full_forward(config):
        return jnp.where(real[:, :, None], config.forward(params, tokens, positions, real), 0)

    assert_close(jax.jit(full_forward, static_argnums=0)(fused), full_forward(plain))

    def step_by_step(config):
        cache, outputs, step = config.init_cache(3, 9), [], jax.jit(config.forward_cached)
        for t in range(9):
            # Finished rows are padding, as in a rollout
            at = jnp.where(real[:, t : t + 1], positions[:, t : t + 1], 9)
            hidden, cache = step(params, tokens[:, t : t + 1], at, cache, None)
            outputs.append(jnp.where(real[:, t, None], hidden[:, 0], 0))
        return jnp.stack(outputs, 1)

    assert_close(step_by_step(fused), full_forward(plain))


def test_kernels_are_used_where_they_are_supported():
    cases = {('gpu', 64): 'cudnn', ('tpu', 128): 'pallas', ('tpu', 80): '', ('cpu', 64): ''}
    for (platform, head_dim), kind in cases.items():
        assert kernels.kind_for(platform, 'bfloat16', head_dim) == kind
        assert kernels.kind_for(platform, 'float32', head_dim) == ''
