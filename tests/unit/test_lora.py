"""LoRA: adapters on a frozen model, by hand and against float64, and the effect of a step."""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_models
import toy_rollouts as toy
from flax import traverse_util
from jax.sharding import AxisType

from agentrl_jax.machine import sharding
from agentrl_jax.models import Model, decoder, lora
from agentrl_jax.records.progress import Progress
from agentrl_jax.run import build as build_module
from agentrl_jax.run import cloning, loading, parts
from agentrl_jax.run import state as start
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import Demonstrations, FrozenParams

SCALE = 1.5
TINY = dataclasses.replace(tiny_models.TINY, lora_scale=SCALE)
QUICK = {'xla_backend_optimization_level': 0}
LR = 1e-5


def fresh_adapters(model, rank=3, targets=lora.TARGETS):
    init = functools.partial(lora.init, jax.random.key(0), rank=rank, targets=targets)
    return jax.jit(init, compiler_options=QUICK)(model)


class OneLayer(nn.Module):
    """A single dense layer of the model."""

    features: int
    config: Model = TINY

    @nn.compact
    def __call__(self, x):
        return decoder.dense(x, self.features, 'up_proj', self.config)


def apply_layer(kernel, a, b, x):
    adapter = {'lora_a': a, 'lora_b': b}
    variables = {'params': {'up_proj': {'kernel': kernel}}, 'lora': {'up_proj': adapter}}
    return OneLayer(kernel.shape[1]).apply(variables, x)


# ---- one layer -----------------------------------------------------------------------------------


def test_a_layer_and_its_merged_kernel_by_hand():
    # A B = (1, 2)^T (0.5, -1) = ((0.5, -1), (1, -2)); 1.5 of it on W = ((1, 2), (3, 4)):
    # ((1.75, 0.5), (4.5, 1)). For x = (1, 1): x W = (4, 6), x A = 3, 1.5 x 3 B = (2.25, -4.5).
    kernel = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    a, b = jnp.array([[1.0], [2.0]]), jnp.array([[0.5, -1.0]])
    out = apply_layer(kernel, a, b, jnp.ones((1, 1, 2)))
    np.testing.assert_array_equal(out[0, 0], [6.25, 1.5])
    tree = {
        'model': {'up_proj': {'kernel': kernel}},
        'lora': {'up_proj': {'lora_a': a, 'lora_b': b}},
    }
    merged = lora.merge(tree, SCALE)
    assert merged.keys() == {'model'}
    np.testing.assert_array_equal(merged['model']['up_proj']['kernel'], [[1.75, 0.5], [4.5, 1.0]])


# ---- the model -----------------------------------------------------------------------------------


def test_a_model_with_adapters_is_the_model_with_merged_kernels():
    """Values are equal, and so are gradients by the chain rule: dA = s dW B^T, dB = s A^T dW."""
    config = dataclasses.replace(TINY, remat=True)
    params = tiny_models.with_adapters(TINY)
    tokens, positions = tiny_models.rows(config)
    weight = jax.random.normal(jax.random.key(5), (*tokens.shape, config.hidden_size))

    def loss(params):
        hidden = config.forward(params, tokens, positions, jnp.ones(tokens.shape, bool))
        return (hidden * weight).sum(), hidden

    def of_adapters(adapters):
        return loss({**params, 'lora': adapters})

    def gradient(of, at):
        program = jax.jit(jax.grad(of, has_aux=True), compiler_options=QUICK)
        return jax.device_get(program(at))

    grads, applied = gradient(of_adapters, params['lora'])
    kernel_grads, expected = gradient(loss, lora.merge(params, SCALE))
    np.testing.assert_allclose(applied, expected, atol=2e-5)
    for block, names in (('self_attn', lora.ATTENTION), ('mlp', lora.TARGETS[4:])):
        for name in names:
            got, adapter, dense = (
                tree['layers_1'][block][name]
                for tree in (grads, params['lora'], kernel_grads['model'])
            )
            a, b, dw = (
                np.float64(x) for x in (adapter['lora_a'], adapter['lora_b'], dense['kernel'])
            )
            assert np.abs(dw).max() > 0.1
            np.testing.assert_allclose(got['lora_a'], SCALE * dw @ b.T, atol=2e-4)
            np.testing.assert_allclose(got['lora_b'], SCALE * a.T @ dw, atol=2e-4)


def test_fresh_adapters_change_no_bit():
    params, (tokens, positions) = tiny_models.random_params(TINY), tiny_models.rows(TINY)
    adapters = fresh_adapters(params['model'])
    fresh = {**params, 'lora': adapters}
    jax.tree.map(np.testing.assert_array_equal, lora.merge(fresh, SCALE), params)
    every = jnp.ones(tokens.shape, bool)
    run = jax.jit(lambda p: TINY.forward(p, tokens, positions, every))
    np.testing.assert_array_equal(run(fresh), run(params))


def test_adapters_are_drawn_only_for_the_targets():
    """A is uniform in +-1 / sqrt(in): variance 1 / (3 in); every kernel has a separate draw."""
    model = tiny_models.random_params(TINY)['model']
    adapters = fresh_adapters(model, 5, ('q_proj', 'down_proj'))
    assert adapters.keys() == {'layers_0', 'layers_1'}
    layer = adapters['layers_1']
    assert {n: set(part) for n, part in layer.items()} == {
        'self_attn': {'q_proj'},
        'mlp': {'down_proj'},
    }
    down = layer['mlp']['down_proj']
    assert down['lora_a'].shape == (96, 5) and down['lora_b'].shape == (5, 64)
    assert not down['lora_b'].any()
    assert 0.8 / np.sqrt(96) < np.abs(down['lora_a']).max() <= 1 / np.sqrt(96)
    np.testing.assert_allclose(np.var(down['lora_a']), 1 / (3 * 96), rtol=0.2)
    other = adapters['layers_0']['mlp']['down_proj']
    assert (other['lora_a'] != down['lora_a']).all()


def test_applied_adapters_need_no_copy_and_no_gradient_of_the_kernels():
    """In contrast, the gradient through merge holds at least one more array per kernel."""
    config = dataclasses.replace(TINY, hidden_size=128, intermediate_size=512, num_layers=3)
    params = jax.eval_shape(lambda: tiny_models.with_adapters(config, rank=2))
    row = jax.ShapeDtypeStruct((1, 16), jnp.int32)

    def loss(params, tokens):
        hidden = config.forward(params, tokens, tokens, tokens >= 0)
        return jnp.square(hidden).sum()

    def bytes_of(use):
        program = jax.grad(lambda ad, base, x: loss(use({**base, 'lora': ad}), x))
        base = {'model': params['model']}
        compiled = jax.jit(program).lower(params['lora'], base, row).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    kernels = sum(x.size for x in jax.tree.leaves(params['model']['layers_0'])) * 3 * 4
    through_merge = bytes_of(lambda tree: lora.merge(tree, config.lora_scale))
    assert bytes_of(lambda tree: tree) < through_merge - 0.7 * kernels


# ---- cloning -------------------------------------------------------------------------------------


def built(fields, shape):
    """Build a run up to its model."""
    cfg, mesh = read_config(micro_runs.config('frozen_lake', **fields), None), mesh_of(*shape)
    config, params = loading.build_model(cfg, loading.build_tokenizer(cfg), mesh)
    optimizers = parts.build_optimisers(cfg)
    return types.SimpleNamespace(
        config=cfg, model=config, mesh=mesh, params=params, optimizers=optimizers
    )


@functools.cache
def cloned(shape=(1, 1, 1)):
    """Return (parameters before and after cloning with adapters of rank 2, losses)."""
    fields = {
        'lora.rank': 2,
        'lora.targets': 'q_proj,up_proj',
        'clone.adapters': True,
        'clone.episodes': 16,
        'clone.batch': 8,
        'clone.steps': 6,
        'clone.lr': 0.02,
    }
    run = built(fields, shape)
    tokens = np.random.default_rng(0).integers(0, 40, (16, 24))
    used = np.ones(tokens.shape, bool)
    demonstrations = Demonstrations(tokens.astype(np.int32), used, used & (np.arange(24) > 4))
    losses, layouts = [], jax.tree.map(lambda x: x.sharding, run.params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, 'advance', lambda self, n, loss: losses.append(float(loss)))
        after = cloning.cloned_policy(run, demonstrations)
    assert jax.tree.map(lambda x: x.sharding, after) == layouts
    return *jax.device_get((run.params, after)), losses


def test_cloning_merges_adapters_into_kernels_and_changes_nothing_else():
    before, after, losses = cloned()
    assert losses[-1] < losses[0]
    before, after = map(traverse_util.flatten_dict, (before, after))
    assert before.keys() == after.keys()
    for path, kernel in after.items():
        moved = kernel.astype(np.float64) - before[path]
        if path[-1] == 'kernel' and path[-2] in ('q_proj', 'up_proj'):
            sizes = np.linalg.svd(moved, compute_uv=False)
            assert sizes[1] > 0 and (sizes[2:] < 1e-4 * sizes[0]).all()  # the rank of the adapters
        else:
            assert not moved.any()


def test_cloning_with_adapters_gives_the_same_result_on_a_mesh():
    one, eight = cloned(), cloned((2, 2, 2))
    np.testing.assert_allclose(one[2], eight[2], rtol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), one[1], eight[1])


# ---- one update ----------------------------------------------------------------------------------

UPDATES = {
    'ppo': {'algorithm': 'ppo'},
    'ppo on a shared backbone': {'algorithm': 'ppo', 'critic.share_backbone': True},
    'grpo with a reference': {'algorithm': 'grpo', 'loss.kl_coef': 0.1},
}
FROZEN_ATTENTION = {'algorithm': 'ppo', 'critic.freeze_attention': True, 'critic.updates': 2}


def mesh_of(data, fsdp, tensor):
    devices = jax.devices()[: data * fsdp * tensor]
    kinds = (AxisType.Auto,) * 3
    return jax.make_mesh((data, fsdp, tensor), sharding.AXES, axis_types=kinds, devices=devices)


@functools.cache
def updated(name, shape=(1, 1, 1), rank=2):
    """Return (state before, after, frozen before, after, metrics) of a learn step with adapters."""
    fields = {
        'lora.rank': rank,
        'lora.targets': 'q_proj,o_proj,up_proj,down_proj',
        'optim.lr': LR,
        'optim.critic_lr': LR,
        'rollout.group_size': 2,
        'batch.minibatch_rows': 4,
        'batch.microbatch_rows': 4,
        'batch.epochs': 2,
    }
    run = built((UPDATES[name] if name in UPDATES else FROZEN_ATTENTION) | fields, shape)
    cfg, config, mesh, params = run.config, run.model, run.mesh, run.params
    state = start.start_state(run, params)
    reference = jax.tree.map(jnp.copy, state.params) if cfg.algorithm.uses_reference else None
    frozen = FrozenParams({'model': params['model']} if rank else {}, reference)
    before = jax.device_get((state, frozen))
    fns = parts.build_functions(cfg, config, mesh)
    how = build_module.build_update_settings(cfg, mesh, None)
    learn = functools.partial(build_module.learn, fns=fns, settings=how)
    rollout = jax.device_put(toy.random_rollout(3), sharding.shard_rows(mesh))
    after, metrics, *_ = jax.jit(learn, compiler_options=QUICK)(state, frozen, rollout)
    return *before, *jax.device_get((after, frozen, metrics))


def count(tree):
    return sum(x.size for x in jax.tree.leaves(tree) if x.ndim)


SHARED = pytest.param('ppo on a shared backbone', marks=pytest.mark.soak)
each_update = pytest.mark.parametrize('name', ['ppo', SHARED, 'grpo with a reference'])


@each_update
def test_an_update_changes_only_adapters_and_heads(name):
    before, frozen, after, same, metrics = updated(name)
    jax.tree.map(np.testing.assert_array_equal, frozen, same)
    assert int(after.skipped) == 0 and metrics['policy/grad_norm'] > 0
    assert before.params.keys() == {'lora'} | ({'value_head'} if 'shared' in name else set())
    trained = [(before.params, after.params), (before.critic_params, after.critic_params)]
    for one, other in trained:
        moved = jax.tree.map(lambda x, y: bool((x != y).any()), one, other)
        assert all(jax.tree.leaves(moved))


def test_a_separate_critic_has_other_adapters_on_the_same_base():
    state = updated('ppo')[0]
    backbone = state.critic_params['backbone']
    assert state.critic_params.keys() == {'backbone', 'value_head'} and backbone.keys() == {'lora'}
    a, b = (
        adapters['layers_0']['mlp']['up_proj']
        for adapters in (state.params['lora'], backbone['lora'])
    )
    assert (a['lora_a'] != b['lora_a']).all() and not b['lora_b'].any()
    assert count(state.critic_opt_state) == 2 * count(state.critic_params)


@each_update
def test_the_optimiser_holds_two_moments_per_trained_parameter(name):
    before, *_ = updated(name)
    assert count(before.opt_state) == 2 * count(before.params)
    # q, o [32, 32]; up [32, 64], down [64, 32]: rank 2 x (64 + 64 + 96 + 96) numbers in 1 layer
    head = 33 if 'shared' in name else 0
    assert count(before.params) == 2 * (64 + 64 + 96 + 96) + head


@pytest.mark.soak
@pytest.mark.parametrize('rank, shape', [(2, (1, 1, 1)), (0, (2, 2, 2))], ids=['LoRA', 'mesh'])
def test_frozen_attention_of_the_critic_does_not_change(rank, shape):
    """Its other parameters move, and only they have moments; the policy's attention trains."""
    before, _, after, _, _ = updated('frozen attention', shape, rank)
    ours, theirs = (traverse_util.flatten_dict(x.critic_params) for x in (before, after))
    frozen = {path for path in ours if 'self_attn' in path}
    assert {path[-2] for path in frozen} >= {'q_proj', 'o_proj'}
    for path, x in ours.items():
        assert (x == theirs[path]).all() == (path in frozen), path
    trains = sum(x.size for path, x in ours.items() if path not in frozen)
    assert count(before.critic_opt_state) == count(after.critic_opt_state) == 2 * trains
    policy = (traverse_util.flatten_dict(x.params) for x in (before, after))
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), *policy)
    assert all(moved.values())


def test_the_reference_is_the_base_without_adapters():
    """With new adapters, the KL is zero in the step of the first epoch, but not of the second."""
    *_, metrics = updated('grpo with a reference')
    assert 0 < metrics['policy/kl_ref'] < 1e-4


@pytest.mark.soak
def test_eight_devices_update_adapters_like_one():
    one, eight = (updated('ppo on a shared backbone', shape)[2] for shape in ((1, 1, 1), (2, 2, 2)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), one, eight)


def test_adapters_are_sharded_like_their_kernels():
    """A is split like the kernel's input, B like its output; the rank is never split."""
    mesh = sharding.make_mesh(2, 2, 2)
    abstract = jax.eval_shape(lambda: tiny_models.with_adapters(TINY, rank=4))
    for rules, axis in ((sharding.TRAIN_RULES, 'fsdp'), (sharding.ROLLOUT_RULES, None)):
        layer = sharding.specs(abstract, rules, mesh)['lora']['layers_0']
        up, down = layer['mlp']['up_proj'], layer['mlp']['down_proj']
        assert tuple(up['lora_a'].spec) == (axis,) and tuple(up['lora_b'].spec) == (None, 'tensor')
        assert tuple(down['lora_a'].spec) == ('tensor',)
        assert tuple(down['lora_b'].spec) == (None, axis)


# ---- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'field, value',
    [('rank', -1), ('alpha', 0.0), ('targets', 'q_proj,query'), ('targets', 'v_proj, v_proj')],
)
def test_impossible_adapters_are_rejected(field, value):
    assert lora.target_names('q_proj, v_proj') == ('q_proj', 'v_proj')
    with pytest.raises(ValueError, match=f'lora.{field}'):
        read_config(micro_runs.config('frozen_lake', **{'lora.rank': 2, f'lora.{field}': value}))
