"""Layers in a loop: the same results as unrolled layers, with a program of one layer."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from agentrl_jax.machine import sharding

LAYERS = 3
UNROLLED = dataclasses.replace(
    tiny_models.TINY, num_layers=LAYERS, lora_scale=1.5, scan_layers=False
)
LOOP = dataclasses.replace(UNROLLED, scan_layers=True)
ROWS, LENGTH = 8, 11
QUICK = {'xla_backend_optimization_level': 0}


def loss(params, tokens, positions, mask, *, config, row_sharding=None):
    hidden = config.forward(params, tokens, positions, mask, row_sharding=row_sharding)
    mean = jnp.where(mask[..., None], jnp.sin(hidden.astype(jnp.float32)), 0.0).mean()
    return mean, config.logits(params, hidden)


def program(config, params, mesh_shape=None):
    """Return (jitted gradient and logits, its arguments), in the training layout."""
    tokens, positions = tiny_models.rows(config, batch=ROWS, length=LENGTH)
    data = tokens, positions, jnp.asarray(np.arange(LENGTH)[None] < np.arange(4, 12)[:, None])
    if mesh_shape is None:
        of = functools.partial(loss, config=config)
        return jax.jit(jax.grad(of, has_aux=True), compiler_options=QUICK), (params, *data)
    mesh = sharding.make_mesh(*mesh_shape)
    rows, layout = sharding.shard_rows(mesh), sharding.specs(params, sharding.TRAIN_RULES, mesh)
    of = jax.grad(functools.partial(loss, config=config, row_sharding=rows), has_aux=True)
    gradient = jax.jit(of, out_shardings=(layout, None), compiler_options=QUICK)
    return gradient, (jax.device_put(params, layout), *jax.device_put(data, rows))


@functools.cache
def outcome(config):
    """Return the gradient of all parameters, including adapters, and logits."""
    gradient, arguments = program(config, tiny_models.with_adapters(config))
    return jax.device_get(gradient(*arguments))


def assert_close(got, expected, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, expected)


@pytest.mark.soak
@pytest.mark.parametrize('remat', [False, True], ids=['kept', 'remat'])
def test_the_loop_has_the_logits_and_gradients_of_unrolled_layers(remat):
    expected = outcome(UNROLLED)
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected[0])) > 0.01
    assert_close(outcome(dataclasses.replace(LOOP, remat=remat)), expected, 1e-5)


def test_in_bfloat16_the_loop_rounds_like_unrolled_layers():
    params = tiny_models.with_adapters(UNROLLED)
    _, (_, *data) = program(UNROLLED, params)

    def hidden(config, dtype):
        config = dataclasses.replace(config, dtype=dtype)
        program = jax.jit(lambda *x: config.forward(x[0], *x[1:]), compiler_options=QUICK)
        return np.asarray(program(params, *data), np.float32)

    exact, loop, unrolled = (
        hidden(UNROLLED, 'float32'),
        hidden(LOOP, 'bfloat16'),
        hidden(UNROLLED, 'bfloat16'),
    )
    off = np.abs(unrolled - exact).mean()
    assert 0.001 < off < 0.1 and np.abs(loop - unrolled).mean() < off


def test_with_fsdp_no_device_holds_a_full_stack():
    config = dataclasses.replace(LOOP, remat=True)
    gradient, arguments = program(config, tiny_models.random_params(config), (1, 8, 1))
    text = gradient.lower(*arguments).compile().as_text()
    # gate_proj: [64, 96] a layer, split over 8 devices along its inputs
    shapes = set(re.findall(r'= \(?f32\[([\d,]+)\]', text))
    assert f'{LAYERS},8,96' in shapes and '64,96' in shapes  # a shard of the stack; one full layer
    assert f'{LAYERS},64,96' not in shapes
    gathered = re.findall(r'= \(?f32\[([\d,]+)\]\S* all-gather', text)
    assert '64,96' in gathered


def test_a_deeper_model_has_no_larger_program():
    def products(layers):
        config = dataclasses.replace(LOOP, num_layers=layers)
        shapes = jax.eval_shape(config.init, jax.random.key(0))
        ids = jax.ShapeDtypeStruct((2, 4), jnp.int32)
        mask = jax.ShapeDtypeStruct((2, 4), jnp.bool_)
        of = jax.grad(functools.partial(loss, config=config), has_aux=True)
        return str(jax.make_jaxpr(of)(shapes, ids, ids, mask)).count('dot_general')

    assert products(2) == products(5) > 0
