"""Qwen3: the model in every program that Qwen2.5 has, and a run from a folder to an export."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_models
from tiny_models import random_params, rows

from agentrl_jax import export, train
from agentrl_jax.machine import sharding
from agentrl_jax.models import critic, lora, qwen2, weights
from agentrl_jax.tools.demo_tokenizer import DEMO_MODEL

QWEN3 = dataclasses.replace(
    tiny_models.TINY, qkv_bias=False, qk_norm=True, head_dim=32, lora_scale=1.5
)
SMALL = dataclasses.replace(
    QWEN3, vocab_size=1408, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1
)
forward = jax.jit(qwen2.forward, static_argnums=1)


def with_adapters():
    params = random_params(QWEN3)
    init = functools.partial(lora.init, jax.random.key(0), rank=3, targets=lora.TARGETS)
    shapes, rng = jax.eval_shape(init, params['model']), np.random.default_rng(2)
    return {
        **params,
        'lora': jax.tree.map(lambda x: jnp.float32(rng.normal(0, 0.1, x.shape)), shapes),
    }


def test_norms_of_queries_and_keys_have_the_width_of_a_head_and_no_biases_stand_beside_them():
    names = {name for name in tiny_models.hf_tensors(QWEN3) if 'layers.0.self_attn' in name}
    parts = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'q_norm', 'k_norm')
    assert names == {f'model.layers.0.self_attn.{part}.weight' for part in parts}
    assert tiny_models.hf_tensors(QWEN3)['model.layers.0.self_attn.k_norm.weight'].shape == (32,)
    with pytest.raises(ValueError, match='both biases and norms'):
        dataclasses.replace(QWEN3, qkv_bias=True)


def test_blocks_against_a_cache_and_merged_adapters_equal_the_whole_forward():
    params = with_adapters()
    tokens, positions = rows(QWEN3, batch=2, length=10)
    whole = forward(params, QWEN3, tokens, positions, jnp.ones(tokens.shape, bool))
    merged, cache = lora.merge(params, QWEN3.lora_scale), qwen2.init_cache(QWEN3, 2, 12)
    found = []
    for start, end in ((0, 6), (6, 9), (9, 10)):
        block = tokens[:, start:end], positions[:, start:end]
        hidden, cache = qwen2.forward_cached(merged, QWEN3, *block, cache, None)
        found.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, rtol=0, atol=2e-5)
    adapters = {
        sharding.path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(params['lora'])[0]
    }
    assert len(adapters) == 2 * 7 * 2 and not any('norm' in name for name in adapters)


def mean(params, tokens, positions, *, config, row_sharding=None):
    hidden = qwen2.forward(
        params, config, tokens, positions, jnp.ones(tokens.shape, bool), row_sharding=row_sharding
    )
    return jnp.sin(hidden).mean()


def test_a_mesh_and_a_loop_over_layers_give_the_gradient_of_one_device():
    params, data = with_adapters(), rows(QWEN3, batch=8, length=7)
    one = jax.jit(jax.grad(functools.partial(mean, config=QWEN3)))(params, *data)
    mesh = sharding.make_mesh(2, 2, 2)
    layout, split = sharding.specs(params, sharding.TRAIN_RULES, mesh), sharding.shard_rows(mesh)
    looped = dataclasses.replace(QWEN3, scan_layers=True, remat=True)
    many = jax.jit(
        jax.grad(functools.partial(mean, config=looped, row_sharding=split)), out_shardings=layout
    )(jax.device_put(params, layout), *jax.device_put(data, split))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), one, many)
    norm = one['model']['layers_1']['self_attn']['q_norm']['scale']
    assert np.abs(norm).max() > 0


def test_the_critic_copies_the_norms():
    params = random_params(QWEN3)
    values = critic.init(params, QWEN3)
    norm = values['backbone']['model']['layers_0']['self_attn']['k_norm']['scale']
    np.testing.assert_array_equal(norm, params['model']['layers_0']['self_attn']['k_norm']['scale'])


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """(config, workdir) of one step of PPO from a folder of random weights."""
    folder = tmp_path_factory.mktemp('model') / 'qwen3'
    tiny_models.write_folder(folder, SMALL, tiny_models.hf_tensors(SMALL))
    changes = {'model.path': str(folder), 'model.tokenizer': str(DEMO_MODEL), 'steps': 1}
    changes |= {'batch.widths': 2, 'rollout.read_tokens': 8}
    cfg = micro_runs.config('frozen_lake', **changes)
    workdir = tmp_path_factory.mktemp('run')
    assert train.train(cfg, str(workdir)) == 0
    return cfg, workdir


def test_a_run_from_a_folder_trains_the_norms_and_exports_what_transformers_reads(
    trained, tmp_path
):
    torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
    cfg, workdir = trained
    out = export.export_checkpoint(
        cfg, str(workdir), str(tmp_path / 'out'), step=None, dtype='float32'
    )
    config, params = weights.load_model(out)
    assert config == dataclasses.replace(SMALL, lora_scale=1.0)
    _, before = weights.load_model(cfg.model.path)
    norms = [p['model']['layers_0']['self_attn']['q_norm']['scale'] for p in (before, params)]
    assert (norms[0] != norms[1]).any()
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(model).__name__ == 'Qwen3ForCausalLM'
    tokens, positions = rows(config, batch=2, length=9)
    with torch.no_grad():
        theirs = model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    hidden = forward(params, config, tokens, positions, jnp.ones(tokens.shape, bool))
    ours = np.asarray(qwen2.logits(params, config, hidden))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer('Up || Left\n')['input_ids'] == (
        export.hf_folder.load_tokenizer(DEMO_MODEL).encode('Up || Left\n')
    )
