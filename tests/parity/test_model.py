"""The model and the critic: on meshes, in bfloat16, and by hand."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, forward, random_params, rows

from agentrl_jax.machine import sharding
from agentrl_jax.models import attention, base, critic, decoder, sizes
from agentrl_jax.models.functions import model_functions

fns = model_functions(TINY, None, has_critic=True, shares_backbone=False)
values = jax.jit(functools.partial(fns.values, None))


def test_rotation_by_hand():
    # Dh = 4, theta = 100: frequencies 100^0 = 1 and 100^(-2/4) = 0.1; pairs are (0, 2) and (1, 3).
    config = dataclasses.replace(TINY, head_dim=4, rope_theta=100.0)
    frequencies = decoder.rope_frequencies(config)
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    turned = decoder.rotate(x, (3.0 * frequencies).reshape(1, 1, 2))
    # pair (1, 0) by 3 -> (cos 3, sin 3); pair (0, 2) by 0.3 -> (-2 sin 0.3, 2 cos 0.3)
    expected = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    np.testing.assert_allclose(turned.reshape(-1), expected, rtol=1e-5)


def test_padding_changes_neither_values_nor_gradient():
    params = random_params(TINY)
    tokens, positions = rows(TINY, length=6)

    def loss(params, tokens, positions, mask):
        hidden = forward(params, TINY, tokens, positions, mask)
        return jnp.sum(jnp.where(mask[..., None], jnp.sin(hidden), 0.0))

    plain = jax.jit(jax.value_and_grad(loss))(
        params, tokens, positions, jnp.ones(tokens.shape, bool)
    )
    pad = ((0, 0), (3, 2))
    mask = jnp.pad(jnp.ones(tokens.shape, bool), pad)
    wide = jax.jit(jax.value_and_grad(loss))(
        params, jnp.pad(tokens, pad, constant_values=5), jnp.pad(positions, pad), mask
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, wide)


def test_recomputing_layers_changes_no_gradient():
    params = random_params(TINY)
    tokens, positions = rows(TINY)
    mask = jnp.ones(tokens.shape, bool)

    def gradient(config):
        return jax.jit(jax.grad(lambda p: forward(p, config, tokens, positions, mask).sum()))(
            params
        )

    remat = dataclasses.replace(TINY, remat=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5),
        gradient(TINY),
        gradient(remat),
    )
    text = str(jax.make_jaxpr(lambda p: forward(p, remat, tokens, positions, mask))(params))
    assert 'remat' in text or 'checkpoint' in text


@pytest.mark.soak
@pytest.mark.parametrize('tied', [True, False])
def test_transposed_kernels_change_only_rounding(tied):
    config = dataclasses.replace(TINY, tie_embeddings=tied)
    params, (tokens, positions) = random_params(config), rows(config)

    @functools.partial(jax.jit, static_argnums=1)
    def read(params, config):
        if config.transposed:
            params = base.transpose_kernels(params)
        cache = config.init_cache(*tokens.shape)
        hidden = []
        for block in (slice(0, 7), *(slice(t, t + 1) for t in range(7, tokens.shape[1]))):
            out, cache = config.forward_cached(
                params, tokens[:, block], positions[:, block], cache, None
            )
            hidden.append(out)
        hidden = jnp.concatenate(hidden, axis=1)
        return hidden, config.logits(params, hidden)

    turned = read(params, dataclasses.replace(config, transposed=True))
    for one, other in zip(read(params, config), turned, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize(
    'scale, eps',
    [(1e6, 1e-6), (1e19, 1e-6), (1e25, 1e-6), (1.0, np.nan), (1.0, np.inf), (1.0, -1.0)],
)
def test_a_model_that_overflows_float32_has_no_finite_logit(scale, eps):
    """A norm of an infinite mean square was 0, so weights x 1e25 sampled uniformly."""
    config = dataclasses.replace(TINY, rms_norm_eps=eps)
    params = jax.tree.map(lambda x: x * np.float32(scale), random_params(TINY))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    tokens, positions = rows(TINY, 2, 4)
    hidden = forward(params, config, tokens, positions, jnp.ones_like(tokens, bool))
    assert not np.isfinite(config.logits(params, hidden)).any()


def test_bfloat16_compute_keeps_float32_masters_and_logits():
    config = dataclasses.replace(TINY, dtype='bfloat16')
    params = random_params(config)
    tokens, positions = rows(config)
    mask = jnp.ones(tokens.shape, bool)
    hidden = forward(params, config, tokens, positions, mask)
    assert hidden.dtype == jnp.bfloat16
    assert config.init_cache(2, 4).k[0].dtype == jnp.bfloat16
    ours = config.logits(params, hidden)
    assert ours.dtype == jnp.float32
    exact = TINY.logits(params, forward(params, TINY, tokens, positions, mask))
    # bfloat16 keeps 8 bits: a few hundredths of the logits' spread
    assert np.abs(ours - exact).mean() < 0.03 * np.asarray(exact).std()
    grads = jax.jit(jax.grad(lambda p: forward(p, config, tokens, positions, mask).sum()))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype('float32')}


def test_fsdp_moves_parameters_between_devices_but_no_activations(monkeypatch):
    monkeypatch.setattr(attention, 'SCORE_BYTES', 1)  # rows of each device in two parts
    mesh, params = sharding.make_mesh(1, 8, 1), random_params(TINY)
    layout, split = sharding.specs(params, sharding.TRAIN_RULES, mesh), sharding.shard_rows(mesh)
    data = rows(TINY, batch=16, length=11)
    arguments = jax.device_put(params, layout), *jax.device_put((*data, data[0] >= 0), split)

    def mean_nll(params, *data, row_sharding):
        hidden = TINY.forward(params, *data, row_sharding=row_sharding)
        chosen = jnp.arange(TINY.vocab_size)[None, None] == data[0][..., None]
        return -jnp.where(chosen, jax.nn.log_softmax(TINY.logits(params, hidden)), 0.0).mean()

    def moved(row_sharding):
        loss = functools.partial(mean_nll, row_sharding=row_sharding)
        program = jax.jit(jax.value_and_grad(loss), out_shardings=(None, layout))
        text = program.lower(*arguments).compile().as_text()
        shapes = re.findall(r'= \(?\w+\[([\d,]*)\]\S* .*?(?:all-\w+|reduce-scatter)\(', text)
        return [s for s in shapes if s.count(',') > 1 or s.startswith(('16,11', f'{16 * 11},'))]

    assert moved(None) and not moved(split)


def test_parameter_counts_match_the_published_models():
    # Qwen2.5-0.5B: V D = 151936 x 896 = 136134656. A layer: q 896 x 896 + 896, k and v 896 x 128
    # + 128 each, o 896 x 896, SwiGLU 3 x 896 x 4864, two norms 896; 24 layers; the last norm.
    layer = 896 * 896 + 896 + 2 * (896 * 128 + 128) + 896 * 896 + 3 * 896 * 4864 + 2 * 896
    count = sizes.named('Qwen2.5-0.5B').param_count()
    assert count == 136134656 + 24 * layer + 896 == 494032768


def test_a_fresh_critic_copies_the_backbone_and_returns_zero():
    policy = random_params(dataclasses.replace(TINY, tie_embeddings=False))
    params = critic.init(policy, TINY)
    assert set(params) == {'backbone', 'value_head'} and set(params['backbone']) == {'model'}
    jax.tree.map(np.testing.assert_array_equal, params['backbone']['model'], policy['model'])
    tokens, positions = rows(TINY)
    out = values(params, tokens, positions, jnp.ones(tokens.shape, bool))
    assert out.shape == tokens.shape and out.dtype == jnp.float32
    assert not out.any()


def test_values_by_hand_and_their_gradient_reaches_the_head():
    # hidden (1, 2) with kernel (3, -1) and bias 0.5: 3 - 2 + 0.5 = 1.5
    head = {'kernel': jnp.array([[3.0], [-1.0]]), 'bias': jnp.array([0.5])}
    hidden = jnp.array([[[1.0, 2.0]]])
    np.testing.assert_allclose(critic.value_from_hidden(head, hidden), [[1.5]])
    params = critic.init(random_params(TINY), TINY)
    tokens, positions = rows(TINY)
    mask = jnp.ones(tokens.shape, bool)
    grads = jax.jit(jax.grad(lambda p: values(p, tokens, positions, mask).sum()))(params)
    assert np.abs(grads['value_head']['kernel']).max() > 0.1
    np.testing.assert_allclose(grads['value_head']['bias'], [tokens.size])
