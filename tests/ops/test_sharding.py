"""Meshes and partition rules: the first match wins, and indivisible axes are replicated."""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
import updates
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import sharding
from agentrl_jax.models import critic

TINY = tiny_models.UNTIED
CUBE = (2, 2, 2)


def spec_of(tree, path):
    for part in path.split('/'):
        tree = tree[part]
    return tree.spec


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def abstract_critic(policy, config):
    return jax.eval_shape(lambda params: critic.init(params, config), policy)


@pytest.mark.parametrize('sizes', [(4, 1, 1), (4, 2, 2), (0, 8, 1), (-1, -8, 1)])
def test_a_mesh_that_does_not_use_all_devices_is_rejected(sizes):
    with pytest.raises(ValueError, match='does not match the 8 available devices.*product 8'):
        sharding.make_mesh(*sizes)


def test_shapes_of_numpy_arrays_have_the_dtype_of_the_device():
    """Previously plans warned about int64 on jax 0.11.2."""
    replicated = jax.sharding.NamedSharding(sharding.make_mesh(*CUBE), P())
    shapes = sharding.with_layout((np.zeros(2, np.int64), jax.random.key(0)), replicated)
    assert shapes[0].dtype == np.int32 and shapes[1].dtype == jax.random.key(0).dtype


def test_training_rules_by_hand():
    layout = sharding.specs(TINY.abstract_params(), sharding.TRAIN_RULES, sharding.make_mesh(*CUBE))
    for path, spec in {
        'model/embed_tokens/embedding': P('tensor', 'fsdp'),
        'lm_head/kernel': P('fsdp', 'tensor'),
        'model/layers_1/self_attn/q_proj/kernel': P('fsdp', 'tensor'),
        'model/layers_1/self_attn/k_proj/bias': P('tensor'),
        'model/layers_1/self_attn/o_proj/kernel': P('tensor', 'fsdp'),
        'model/layers_1/mlp/down_proj/kernel': P('tensor', 'fsdp'),
        'model/layers_1/input_layernorm/scale': P(),
        'model/norm/scale': P(),
    }.items():
        assert spec_of(layout, path) == spec


def test_heads_not_divisible_by_the_tensor_axis_are_not_split():
    """Previously halves of a head on two devices were permuted for each token; see test_runs."""
    mesh = sharding.make_mesh(*CUBE)
    rules = sharding.rollout_rules(mesh, num_heads=4, num_kv_heads=1)
    layout = sharding.specs(TINY.abstract_params(), rules, mesh)
    at = 'model/layers_1/self_attn'
    assert spec_of(layout, f'{at}/k_proj/kernel') == spec_of(layout, f'{at}/v_proj/bias') == P()
    assert spec_of(layout, f'{at}/q_proj/kernel') == P(None, 'tensor')
    assert spec_of(layout, f'{at}/o_proj/kernel') == P('tensor', None)
    even = sharding.rollout_rules(mesh, num_heads=4, num_kv_heads=2)
    assert even == sharding.ROLLOUT_RULES


@pytest.mark.parametrize('sizes', [CUBE, (8, 1, 1), (1, 8, 1), (2, 1, 4)])
def test_parameters_have_the_layout_that_xla_returns(sizes):
    """Previously specs named axes of size one, so updated parameters needed other programs."""
    layout = sharding.specs(
        TINY.abstract_params(), sharding.TRAIN_RULES, sharding.make_mesh(*sizes)
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), TINY.abstract_params())
    updated = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))(
        jax.device_put(zeros, layout)
    )
    for before, after in zip(jax.tree.leaves(layout), jax.tree.leaves(updated), strict=True):
        named = [axis for axis in before.spec if axis]
        assert named == [axis for axis in after.sharding.spec if axis]


def test_an_axis_that_does_not_divide_is_omitted():
    # 6 rows over fsdp = 4 do not divide; 8 columns over tensor = 2 do.
    rules = ((r'kernel$', P('fsdp', 'tensor')),)
    layout = sharding.specs({'kernel': shape(6, 8)}, rules, sharding.make_mesh(1, 4, 2))
    assert layout['kernel'].spec == P(None, 'tensor')


def test_a_parameter_without_a_rule_is_named():
    tree = {'model': {'layers_0': {'router': {'kernel': shape(4, 4)}}}}
    with pytest.raises(ValueError, match='model/layers_0/router/kernel'):
        sharding.specs(tree, sharding.TRAIN_RULES, sharding.make_mesh(*CUBE))


@pytest.mark.parametrize('rules', [sharding.TRAIN_RULES, sharding.ROLLOUT_RULES])
def test_every_parameter_of_policy_and_critic_has_a_rule(rules):
    mesh = sharding.make_mesh(*CUBE)
    for config in (TINY, *tiny_models.FAMILIES.values()):
        policy = config.abstract_params()
        tree = {'policy': policy, 'critic': abstract_critic(policy, config)}
        assert len(jax.tree.leaves(sharding.specs(tree, rules, mesh))) == len(jax.tree.leaves(tree))


def test_parameters_are_initialised_sharded_with_the_values_of_one_device():
    mesh = sharding.make_mesh(*CUBE)

    def init(key):
        return TINY.init(key)

    split = sharding.init_sharded(init, jax.random.key(0), sharding.TRAIN_RULES, mesh)
    unsplit = jax.jit(init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, unsplit, split)
    layout = sharding.specs(unsplit, sharding.TRAIN_RULES, mesh)
    same = jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), split, layout)
    assert all(jax.tree.leaves(same))


def test_optimiser_moments_are_sharded_like_their_parameters():
    mesh, tx = sharding.make_mesh(*CUBE), optax.adamw(1e-3)
    params = TINY.abstract_params()
    make_state = functools.partial(updates.state, tx)
    state = jax.eval_shape(make_state, params, abstract_critic(params, TINY))
    layout = sharding.specs(state, sharding.TRAIN_RULES, mesh)
    assert layout.opt_state[0].mu == layout.params == layout.opt_state[0].nu
    assert layout.critic_opt_state[0].mu == layout.critic_params
    assert layout.critic_params['backbone']['model'] == layout.params['model']
    assert layout.step.spec == P() and layout.opt_state[0].count.spec == P()


def test_an_empty_array_that_would_crash_jaxlib_is_named(monkeypatch):
    mesh, pool = sharding.make_mesh(*CUBE), {'maps': np.zeros((0, 4))}
    versions = ['0.11.2', '0.11.2', '0.10.2']
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: versions.pop(0))
    with pytest.raises(ValueError, match=r"\['maps'\] has shape \(0, 4\).* install jax 0.11.1"):
        sharding.check_no_empty_array(pool, mesh)
    sharding.check_no_empty_array({'maps': np.zeros((1, 4))}, mesh)
    sharding.check_no_empty_array(pool, mesh)
