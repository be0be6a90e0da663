"""Whole runs with adapters: what they keep, that they resume exactly, what is exported of them."""

import json
import shutil

import jax
import micro_runs
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentrl_jax import evaluate, export, train
from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.models import weights
from agentrl_jax.records import run_log
from agentrl_jax.run import params as run_params
from agentrl_jax.run import state as start
from agentrl_jax.run.streams import Streams
from agentrl_jax.tools.demo_tokenizer import DEMO_MODEL

CHANGES = {
    'lora.rank': 2,
    'lora.alpha': 8.0,
    'lora.targets': 'q_proj,v_proj,down_proj',
    'algorithm': 'grpo',
    'loss.kl_coef': 0.05,
    'clone.episodes': 64,
    'clone.steps': 40,
    'checkpoint.every': 1,
}


@pytest.fixture(scope='module')
def finished(tmp_path_factory, quick_runs):
    """(config, workdir) of three steps of GRPO with adapters and a KL term."""
    cfg = micro_runs.config('frozen_lake', **CHANGES)
    workdir = tmp_path_factory.mktemp('run')
    assert train.train(cfg, str(workdir)) == 0
    return cfg, workdir


def go_on(run, workdir, until):
    """train.train without logs and pages: starts or resumes, saves, and returns the state."""
    checkpoints = checkpoint.open_checkpoints(workdir, keep=2)
    opened = start.open_state(run, checkpoints, Streams(run.cfg.seed))
    state = opened.state
    for step in range(int(state.step), until):
        state = train.train_step(run, opened, state, step, first=False)[0]
    checkpoint.save(checkpoints, until, state, start.saved_beside(run.cfg, opened.streams))
    checkpoint.close(checkpoints)
    return jax.device_get(state)


def rows_of(workdir):
    return run_log.read_metrics(workdir / run_log.METRICS_FILE)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def base_of(cfg, workdir):
    run = train.build(cfg)
    return jax.device_get(run_params.open_base(cfg, workdir, run.params)), run


def test_the_run_trains_adapters_on_the_policy_it_cloned(finished):
    cfg, workdir = finished
    rows = rows_of(workdir)
    assert [row['step'] for row in rows] == [0, 1, 2, 3]
    for row in rows[:-1]:
        assert row['policy/grad_norm'] > 0 and row['policy/kl_ref'] > 0
        assert row['sampler/logprob_gap'] <= 1e-5 and row['update/skipped'] == 0
    assert all(row['perf/recompiles'] == 0 for row in rows) and rows[-1]['eval/return'] != -0.2
    base, run = base_of(cfg, workdir)
    drawn = run.params['model']['layers_0']['mlp']['up_proj']['kernel']
    assert (base['model']['layers_0']['mlp']['up_proj']['kernel'] != drawn).any()
    reference = checkpoint.load_params_only(
        workdir / 'reference',
        sharding.abstract_of(run_params.trained_policy(run.params, cfg, run.config)),
    )
    assert reference.keys() == {'lora'} and not any(
        x.any() for x in jax.tree.leaves(reference) if x.shape[0] == 2
    )  # B: it is the base


def test_checkpoints_hold_adapters_and_their_moments_only(finished):
    """Rank 2: q, v and down_proj of 1 layer, [32, 32], [32, 16], [64, 32]."""
    cfg, workdir = finished
    state = micro_runs.saved_state(cfg, workdir)
    held = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert held == 3 * 2 * (64 + 48 + 96)
    base, _ = base_of(cfg, workdir)
    assert checkpoint.state_bytes(base) > 10 * checkpoint.state_bytes(state)


def test_a_run_that_was_interrupted_ends_with_the_same_bits(finished, tmp_path):
    """Twice: when only its base was kept, and after two steps."""
    cfg, workdir = finished
    shutil.copytree(workdir / run_params.BASE_FOLDER, tmp_path / run_params.BASE_FOLDER)
    run = train.build(cfg)
    assert int(go_on(run, tmp_path, 2).step) == 2
    assert_same(go_on(run, tmp_path, 3), micro_runs.saved_state(cfg, workdir))


def test_the_base_of_another_run_is_refused(finished, tmp_path):
    cfg, workdir = finished
    shutil.copytree(workdir / run_params.BASE_FOLDER, tmp_path / run_params.BASE_FOLDER)
    params = train.build(cfg).params  # drawn, not cloned
    with pytest.raises(ValueError, match='holds the parameters of another run'):
        run_params.keep_base(cfg, tmp_path, params)


def test_a_run_without_its_base_is_refused(finished, tmp_path):
    cfg, workdir = finished
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / run_params.BASE_FOLDER)
    with pytest.raises(FileNotFoundError, match='base'):
        train.train(cfg, str(tmp_path))


def test_evaluate_plays_adapters_on_their_base(finished, tmp_path):
    """The same episodes as the run's last validation; another seed's weights do not matter."""
    cfg, workdir = finished
    last = rows_of(workdir)[-1]
    metrics = evaluate.evaluate(cfg, str(workdir), str(tmp_path), None)
    for name in ('eval/success', 'eval/return', 'eval/valid_format'):
        assert metrics[name] == last[name]
    changed = cfg.copy_and_resolve_references()
    changed.lora.alpha = 4.0
    with pytest.raises(ValueError, match='lora.alpha: 8.0 in the checkpoint, 4.0 now'):
        evaluate.evaluate(changed, str(workdir), str(tmp_path), None)


# ---- export --------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def exported(finished, tmp_path_factory):
    """part -> folder."""
    cfg, workdir = finished
    out = tmp_path_factory.mktemp('exported')
    return {
        part: export.export_checkpoint(
            cfg, str(workdir), str(out / part), step=None, dtype='float32', part=part
        )
        for part in export.PARTS
    }


def test_the_exported_policy_is_the_base_plus_the_adapter(finished, exported):
    """W + alpha / rank B A with alpha 8, rank 2, in the files' layout: W [out, in]."""
    policy, base = (load_file(exported[part] / weights.SINGLE) for part in ('policy', 'base'))
    adapter = load_file(exported['adapter'] / 'adapter_model.safetensors')
    assert policy.keys() == base.keys()
    found = 0
    for name, kernel in base.items():
        where = f'base_model.model.{name.removesuffix(".weight")}'
        if f'{where}.lora_A.weight' in adapter:
            a, b = (np.float64(adapter[f'{where}.lora_{x}.weight']) for x in 'AB')
            assert b.any()
            np.testing.assert_allclose(policy[name], kernel + 4.0 * b @ a, atol=1e-6)
            found += 1
        else:
            np.testing.assert_array_equal(policy[name], kernel)
    assert found == 3 and len(adapter) == 6


def test_the_adapter_has_the_names_and_shapes_of_peft(exported):
    """huggingface.co/docs/peft/developer_guides/checkpoint, 'Convert to PEFT format'."""
    adapter = load_file(exported['adapter'] / 'adapter_model.safetensors')
    layer = 'base_model.model.model.layers.0'
    assert {name: array.shape for name, array in adapter.items()} == {
        f'{layer}.self_attn.q_proj.lora_A.weight': (2, 32),
        f'{layer}.self_attn.q_proj.lora_B.weight': (32, 2),
        f'{layer}.self_attn.v_proj.lora_A.weight': (2, 32),
        f'{layer}.self_attn.v_proj.lora_B.weight': (16, 2),
        f'{layer}.mlp.down_proj.lora_A.weight': (2, 64),
        f'{layer}.mlp.down_proj.lora_B.weight': (32, 2),
    }
    settings = json.loads((exported['adapter'] / 'adapter_config.json').read_text())
    assert settings['peft_type'] == 'LORA' and settings['task_type'] == 'CAUSAL_LM'
    assert (settings['r'], settings['lora_alpha']) == (2, 8.0)
    assert settings['target_modules'] == ['q_proj', 'v_proj', 'down_proj']
    assert settings['base_model_name_or_path'] is None  # the base was cloned, see --part=base


def test_what_the_run_measured_is_in_no_card_of_the_base(exported):
    cards = {part: (exported[part] / 'README.md').read_text() for part in exported}
    assert 'eval/success' in cards['policy'] and 'eval/success' in cards['adapter']
    assert 'eval/success' not in cards['base'] and '## Metrics\n\nNone.' in cards['base']


def test_peft_opens_the_adapter(exported):
    peft = pytest.importorskip('peft')
    import torch
    import transformers

    tokens = torch.arange(24).reshape(2, 12)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected = load(exported['policy'])(tokens).logits
        base = load(exported['base'])
        plain = base(tokens).logits
        found = peft.PeftModel.from_pretrained(base, exported['adapter'])(tokens).logits
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (plain - expected).abs().max() > 1e-3


def test_parts_of_a_run_without_adapters_are_refused(finished, tmp_path):
    cfg, workdir = finished
    changed = cfg.copy_and_resolve_references()
    with pytest.raises(ValueError, match='--part=adapter asks for a run with LoRA'):
        changed.lora.rank = 0
        export.export_checkpoint(
            changed, str(workdir), str(tmp_path / 'x'), step=None, dtype='float32', part='adapter'
        )
    changed.lora.rank, changed.lora.alpha = 2, 4.0
    with pytest.raises(ValueError, match='lora.alpha: 8.0 in the checkpoint, 4.0 now'):
        export.export_checkpoint(
            changed, str(workdir), str(tmp_path / 'x'), step=None, dtype='float32'
        )


# ---- a base that model.path gives ----------------------------------------------------------------


def test_a_base_of_model_path_is_not_stored_again(exported, tmp_path):
    """The same on the exported policy: no base below the workdir, exact resume."""
    cfg = micro_runs.config(
        'frozen_lake',
        **CHANGES
        | {
            'model.path': str(exported['policy']),
            'model.tokenizer': str(DEMO_MODEL),
            'clone.episodes': 0,
        },
    )
    run = train.build(cfg)
    go_on(run, tmp_path / 'halves', 1)
    assert_same(go_on(run, tmp_path / 'halves', 2), go_on(run, tmp_path / 'whole', 2))
    assert {path.name for path in (tmp_path / 'whole').iterdir()} == {'checkpoints', 'reference'}
    out = export.export_checkpoint(
        cfg,
        str(tmp_path / 'whole'),
        str(tmp_path / 'out'),
        step=None,
        dtype='float32',
        part='adapter',
    )
    settings = json.loads((out / 'adapter_config.json').read_text())
    assert settings['base_model_name_or_path'] == str(exported['policy'])
    given = start.config_dict(cfg)
    assert export.base_is_folder(given)
    given['model']['path'] = str(tmp_path / 'a.gguf')  # PEFT reads folders alone
    assert not export.base_is_folder(given)
