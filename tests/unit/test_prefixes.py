"""Shared prefixes of rows, computed once: tokens attend to their own row; steps are unchanged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
import toy_rollouts as toy
import updates
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.machine import sharding
from agentrl_jax.models import prefixes
from agentrl_jax.models.functions import model_functions
from agentrl_jax.rl import update

UNIT, LENGTH = 4, 24
CONFIG = dataclasses.replace(tiny_models.TINY, num_layers=2)
QUICK = {'xla_backend_optimization_level': 0}
ROW = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH))  # shared tokens, all tokens


def units(shapes, vocabulary=3):
    """Return rows of (tokens shared with the lead, length), and which tokens are real."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, vocabulary, (len(shapes), LENGTH)).astype(np.int32)
    for i, (common, _) in enumerate(shapes):
        tokens[i, :common] = tokens[i - i % UNIT, :common]
    lengths = np.array([length for _, length in shapes])
    real = np.arange(LENGTH) < lengths[:, None]
    return np.where(real, tokens, 0), real, lengths


def test_shared_and_remaining_tokens_by_hand():
    tokens = jnp.asarray([[5, 6, 7, 0], [5, 6, 7, 8], [5, 9, 7, 0], [5, 6, 0, 0]])
    real = tokens > 0
    assert prefixes.shared(tokens, real, 2).tolist() == [[3, 3], [3, 1]]
    assert prefixes.shared(tokens, real, 4).tolist() == [[3, 3, 1, 2]]
    lengths = jnp.asarray([3, 4, 3, 2])
    assert prefixes.rest(tokens, real, lengths, 4).tolist() == [0, 1, 2, 0]
    packed = prefixes.pack(tokens[:2], real[:2], unit=2, room=2)
    assert packed.tokens[0].tolist() == [5, 6, 7, 0, 8, 8]  # the last token is padding
    assert packed.positions[0].tolist() == [0, 1, 2, 3, 3, 4]
    assert packed.lead[0, 2].tolist() == [True, True, True, False]
    assert packed.rest[0, 0].tolist() == [True, True, True, False, True, False]


PACK = jax.jit(prefixes.pack, static_argnames=('unit', 'room'))


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(ROW, min_size=2 * UNIT, max_size=2 * UNIT))
def test_every_token_attends_only_to_its_row(shapes):
    tokens, real, lengths = units(shapes)
    needed = int(prefixes.rest(tokens, real, jnp.asarray(lengths), UNIT).max())
    room = max(8, -(-needed // 8) * 8)
    packed = jax.device_get(PACK(tokens, real, unit=UNIT, room=room))
    for row, length in enumerate(lengths):
        unit, member = divmod(row, UNIT)
        places = packed.places[unit, member * LENGTH :][:length]
        np.testing.assert_array_equal(packed.tokens[unit, places], tokens[row, :length])
        np.testing.assert_array_equal(packed.positions[unit, places], np.arange(length))
        for query in range(length):
            assert sorted(attends_to(packed, unit, places[query])) == sorted(places[: query + 1])


def attends_to(packed, unit, place):
    """Return the positions in a unit that a token of the unit attends to."""
    if place < LENGTH:
        return np.flatnonzero(packed.lead[unit, place])
    room = packed.rest.shape[1]
    member, query = divmod(place - LENGTH, room)
    keys = np.flatnonzero(packed.rest[unit * (UNIT - 1) + member, query])
    return np.where(keys < LENGTH, keys, keys + member * room)


SHAPES = [(0, 20), (15, 18), (15, 24), (19, 20), (0, 9), (9, 9), (0, 12), (3, 7)]


@pytest.mark.parametrize(
    'scan', [pytest.param(False, marks=pytest.mark.soak), True], ids=['layers', 'loop']
)
def test_states_and_gradients_equal_those_of_full_rows(scan):
    config = dataclasses.replace(CONFIG, scan_layers=scan, remat=scan)
    tokens, real, _ = units(SHAPES, vocabulary=config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    weights = jax.random.normal(jax.random.key(1), (*tokens.shape, config.hidden_size))
    weights = jnp.where(real[..., None], 0.01 * weights, 0)
    params = jax.jit(config.init)(jax.random.key(0))

    def outcome(forward):
        def loss(params):
            states = forward(params, tokens, positions, jnp.asarray(real))
            return (states * weights).sum(), jnp.where(real[..., None], states, 0)

        return jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)(params)

    full = outcome(config.forward)
    packed = outcome(functools.partial(prefixes.forward, config, unit=UNIT, room=16))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), packed, full)


# ---- updates -------------------------------------------------------------------------------------


def shared_prefix_rollout(rows=16, length=30):
    """Return rows; in each four consecutive rows, all have the first tokens of one of them."""
    rollout = toy.random_rollout(0, rows=rows, length=length, turns=4)
    lead = jnp.arange(rows) // UNIT * UNIT
    common = jnp.arange(length)[None] < jnp.asarray(np.arange(rows) % 7)[:, None]
    real = rollout.attention_mask
    both = common & real & real[lead]
    tokens = jnp.where(both, rollout.tokens[lead], rollout.tokens)
    rollout = rollout.replace(tokens=tokens)
    same = jnp.where(lead == 8, 8, jnp.arange(rows))  # a unit of four identical rows
    return jax.tree.map(lambda x: x[same], rollout)


def step_of(batch, fns, critic=False, mesh=None, **fields):
    tx = optax.sgd(0.1)
    params, other = (jax.jit(CONFIG.init)(jax.random.key(seed)) for seed in (0, 1))
    if critic:
        other = {'backbone': other, 'value_head': value_head(2)}
    else:
        params, other = params | {'value_head': value_head(2)}, None
    state = updates.state(tx, params, other)
    how = updates.settings(len(batch.tokens), tx=tx, kl_estimator='k3', entropy_coef=0.01, **fields)
    run = jax.jit(
        functools.partial(update.update_step, fns=fns, settings=how), compiler_options=QUICK
    )
    if mesh is not None:
        state = jax.device_put(state, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, how.layout)
    return jax.device_get(run(state, batch))


def value_head(seed):
    kernel = jax.random.normal(jax.random.key(seed), (CONFIG.hidden_size, 1))
    return {'kernel': 0.1 * kernel, 'bias': jnp.zeros(1)}


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), a, b)


@pytest.mark.soak
@pytest.mark.parametrize('critic', [False, True], ids=['one backbone', 'a critic'])
def test_shared_prefixes_do_not_change_the_update(critic):
    rollout = shared_prefix_rollout()
    batch = jax.jit(functools.partial(PPO().make_batch, group_size=4))(
        rollout, toy.scores_of(rollout)
    )
    trained = ~jnp.isin(jnp.arange(16), jnp.asarray([1, 4, 5, 6, 7, 12]))  # a unit, a lead, a row
    batch = batch.replace(
        mask=batch.mask & trained[:, None], value_mask=batch.value_mask & trained[:, None]
    )
    fns = model_functions(CONFIG, None, has_critic=True, shares_backbone=not critic)
    run = functools.partial(step_of, batch, fns, critic, num_minibatches=2, num_microbatches=2)
    expected = run()
    assert_close(run(widths=2, prefix_rows=4 - 2 * critic, sparse=critic), expected)
    if critic:
        mesh = sharding.make_mesh(2, 1, 1, jax.devices()[:2])
        rows = sharding.shard_rows(mesh)
        fns = model_functions(CONFIG, rows, has_critic=True, shares_backbone=False)
        spread = functools.partial(step_of, batch, fns, critic, mesh, num_minibatches=2)
        assert_close(spread(layout=rows, widths=2, prefix_rows=4), expected)
