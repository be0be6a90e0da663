"""Model families: checkpoints of transformers, every program, and a run including its export."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_models
from tiny_models import forward, padded, rows, with_adapters

from agentrl_jax import export, train
from agentrl_jax.machine import sharding
from agentrl_jax.models import FAMILIES, decoder, lora, weights
from agentrl_jax.records import run_log
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tools.demo_tokenizer import DEMO_MODEL

QWEN3 = dataclasses.replace(tiny_models.QWEN3, lora_scale=1.5)
OLMO2 = dataclasses.replace(tiny_models.OLMO2, num_kv_heads=1, lora_scale=1.5)
QWEN2 = dataclasses.replace(tiny_models.TINY, lora_scale=1.5)
each_family = pytest.mark.parametrize(
    'config',
    [
        pytest.param(QWEN2, marks=pytest.mark.soak),
        QWEN3,
        pytest.param(OLMO2, marks=pytest.mark.soak),
    ],
    ids=['qwen2', 'qwen3', 'olmo2'],
)


LLAMA3 = dict(rope_type='llama3', rope_theta=5e5, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=32)
ROPE = {'rope_type': 'default', 'rope_theta': 1e4}
WIDE = dict(head_dim=32, rope_parameters=ROPE, num_hidden_layers=3)
UNTIED = dict(tie_word_embeddings=False, num_key_value_heads=4)
VARIANTS = [
    ('qwen2', {}),
    ('qwen2', {'num_key_value_heads': 1}),
    ('qwen2', UNTIED),
    ('qwen2', WIDE),
    ('llama', {}),
    ('llama', UNTIED | {'rope_parameters': LLAMA3}),
    ('qwen3', WIDE),
    ('qwen3', UNTIED),
    ('olmo2', {}),
    ('olmo2', UNTIED),
]


def test_every_family_is_compared_with_transformers():
    assert {kind for kind, _ in VARIANTS} == set(FAMILIES)


@pytest.mark.soak
@pytest.mark.slow('loads transformers')
@pytest.mark.parametrize(('kind', 'change'), VARIANTS)
def test_a_transformers_checkpoint_gives_the_same_logits_and_exports_unchanged(
    tmp_path, kind, change
):
    torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
    sizes = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    config = transformers.AutoConfig.for_model(kind, **sizes | change)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if 'norm' in name else 0.0, 0.14)
    model.save_pretrained(tmp_path / 'theirs')
    ours, params = weights.load_model(tmp_path / 'theirs')

    def of_torch(model, *inputs):
        names = ('input_ids', 'attention_mask', 'position_ids')
        inputs = (torch.tensor(np.asarray(x)).long() for x in inputs)
        with torch.no_grad():
            return model(**dict(zip(names, inputs, strict=True))).logits.numpy()

    out = export.export_hf(params, ours, tmp_path / 'ours', dtype='float32')
    exported = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(exported) is type(model)
    cases = ((1, 4, 9), 9, True), ((40, 64, 17), 64, True), ((2, 5), 9, False)
    for lengths, width, left in cases:
        tokens, _ = rows(ours, len(lengths), width)
        mask, positions = padded(lengths, width, left)
        keep = np.asarray(mask)
        expected = of_torch(model, tokens, mask, positions)
        np.testing.assert_array_equal(of_torch(exported, tokens, mask, positions), expected)
        assert np.abs(expected[keep]).max() > 1  # the comparison is not trivial
        hidden = forward(params, ours, tokens, positions, mask)
        logits = np.asarray(ours.logits(params, hidden))
        np.testing.assert_allclose(logits[keep], expected[keep], rtol=0, atol=1e-5)
        assert np.isfinite(logits).all()


@pytest.mark.slow('loads transformers')
@pytest.mark.parametrize(('kind', 'scaled_in'), [('qwen2', ''), ('olmo2', 'float32')])
def test_norms_round_like_transformers(kind, scaled_in):
    torch, _ = map(pytest.importorskip, ('torch', 'transformers'))
    module = importlib.import_module(f'transformers.models.{kind}.modeling_{kind}')
    theirs = getattr(module, f'{kind.capitalize()}RMSNorm')(64, eps=1e-6)
    x, scale = np.random.default_rng(0).normal(1, 0.3, (2, 500, 64)).astype(np.float32)
    theirs.weight.data = torch.tensor(scale[0]).bfloat16()
    ours = decoder.RMSNorm(1e-6, 'bfloat16', scaled_in)
    scale = jnp.asarray(scale[0], jnp.bfloat16).astype(jnp.float32)
    result = ours.apply({'params': {'scale': scale}}, jnp.asarray(x, jnp.bfloat16))
    expected = theirs(torch.tensor(x).bfloat16()).float().detach().numpy()
    assert (np.asarray(result, np.float32) == expected).mean() > 0.999


@pytest.mark.soak
@each_family
def test_cached_blocks_with_merged_adapters_equal_the_full_forward(config):
    params = with_adapters(config)
    tokens, positions = rows(config, batch=2, length=10)
    full = forward(params, config, tokens, positions, jnp.ones(tokens.shape, bool))
    merged, cache = lora.merge(params, config.lora_scale), config.init_cache(2, 12)
    outputs = []
    for start, end in ((0, 6), (6, 9), (9, 10)):
        block = tokens[:, start:end], positions[:, start:end]
        hidden, cache = config.forward_cached(merged, *block, cache, None)
        outputs.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), full, rtol=0, atol=2e-5)
    adapters = {
        sharding.path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path(params['lora'])[0]
    }
    assert len(adapters) == 2 * 7 * 2 and not any('norm' in name for name in adapters)


def mean(params, tokens, positions, *, config, row_sharding=None):
    hidden = config.forward(
        params, tokens, positions, jnp.ones(tokens.shape, bool), row_sharding=row_sharding
    )
    return jnp.sin(hidden).mean()


@pytest.mark.soak
@pytest.mark.parametrize('config', [QWEN3, OLMO2], ids=['qwen3', 'olmo2'])
def test_a_mesh_and_a_loop_over_layers_give_the_gradient_of_one_device(config):
    params, data = with_adapters(config), rows(config, batch=8, length=7)
    one = jax.jit(jax.grad(functools.partial(mean, config=config)))(params, *data)
    mesh = sharding.make_mesh(2, 2, 2)
    layout, split = sharding.specs(params, sharding.TRAIN_RULES, mesh), sharding.shard_rows(mesh)
    looped = dataclasses.replace(config, scan_layers=True, remat=True)
    many = jax.jit(
        jax.grad(functools.partial(mean, config=looped, row_sharding=split)), out_shardings=layout
    )(jax.device_put(params, layout), *jax.device_put(data, split))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), one, many)
    of_layer = one['model']['layers_1']
    assert np.abs(of_layer['post_attention_layernorm']['scale']).max() > 0
    assert np.abs(of_layer['self_attn']['q_norm']['scale']).max() > 0


RUNS = {
    'qwen3': (QWEN3, {'batch.widths': 2}),
    'olmo2': (OLMO2, {'algorithm': 'grpo', 'lora.rank': 2, 'lora.alpha': 2.0}),
}


@pytest.mark.soak
@pytest.mark.parametrize('kind', RUNS)
def test_a_run_from_a_folder_trains_on_its_samples_and_exports_for_transformers(tmp_path, kind):
    torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
    config, changes = RUNS[kind]
    sizes = dict(vocab_size=1408, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1)
    config = dataclasses.replace(config, **sizes, lora_scale=1.0)
    folder = tiny_models.write_folder(
        tmp_path / 'model', config, tiny_models.hf_tensors(config), max_position_embeddings=512
    )
    paths = {'model.path': str(folder), 'model.tokenizer': str(DEMO_MODEL), 'steps': 1}
    cfg, workdir = micro_runs.config('frozen_lake', **paths, **changes), tmp_path / 'run'
    assert train.train(cfg, str(workdir)) == 0
    (row,) = (
        row
        for row in run_log.read_metrics(workdir / run_log.METRICS_FILE)
        if 'sampler/logprob_gap' in row
    )
    assert row['sampler/logprob_gap'] < 1e-4 and row['update/applied'] > 0
    out = export.export_checkpoint(
        cfg, str(workdir), str(tmp_path / 'out'), step=None, dtype='float32'
    )
    exported, params = weights.load_model(out)
    assert exported == config
    _, before = weights.load_model(folder)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), before, params)
    attention = changed['model']['layers_0']['self_attn']
    assert attention['q_proj']['kernel'] and attention['q_norm']['scale'] == (kind == 'qwen3')
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens, positions = rows(config, batch=2, length=9)
    with torch.no_grad():
        theirs = model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    hidden = forward(params, config, tokens, positions, jnp.ones(tokens.shape, bool))
    np.testing.assert_allclose(config.logits(params, hidden), theirs, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer('Up || Left\n')['input_ids'] == (
        load_tokenizer(DEMO_MODEL).encode('Up || Left\n')
    )
