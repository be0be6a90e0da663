"""Runs opened from their workdir: config, checkpoint and code version."""

import json
import shutil
import subprocess

import jax
import micro_runs
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags
from safetensors.numpy import load_file, save_file

from agentrl_jax import evaluate, export
from agentrl_jax.machine import checkpoint, files
from agentrl_jax.records import about
from agentrl_jax.run import loading, params, saved_config, usage
from agentrl_jax.run import state as start
from agentrl_jax.run.build import build
from agentrl_jax.run.config import as_json

pytestmark = pytest.mark.usefixtures('one_device')
CHANGES = {
    'algorithm': 'grpo',
    'env.train_levels': 24,
    'curriculum.rounds': (1, 2),
    'curriculum.stage_steps': 2,
    'model.scan_layers': True,
    'eval.temperature': 0.5,
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory, one_device):
    """(config, workdir) with checkpoints of steps 2 and 4, and a newer one without its mark."""
    cfg = micro_runs.config('frozen_lake', **CHANGES)
    workdir = tmp_path_factory.mktemp('run')
    run = build(cfg)
    checkpoints = checkpoint.open_checkpoints(workdir, keep=3)
    state = start.start_state(run, run.params)
    for step in (2, 4):
        checkpoint.save(checkpoints, step, state, start.checkpoint_metadata(run))
    poisoned = state.replace(params=jax.tree.map(lambda x: x.at[0].set(np.nan), state.params))
    checkpoint.close(checkpoints)
    dead = tmp_path_factory.mktemp('dead')
    checkpoints = checkpoint.open_checkpoints(dead, keep=3)
    checkpoint.save(checkpoints, 3, poisoned, start.checkpoint_metadata(run))
    checkpoint.close(checkpoints)
    (workdir / 'checkpoints' / '6').mkdir()
    return cfg, workdir, dead


def parse_flags(monkeypatch, *argv):
    """Return the config of a program with these arguments."""
    argv = ['program', *argv]
    monkeypatch.setattr('sys.argv', argv)  # overrides are read from here
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        'config', saved_config.default(argv), 'help', flag_values=values
    )
    flags.DEFINE_string('workdir', None, 'help', flag_values=values)
    flags.DEFINE_integer('step', None, 'help', flag_values=values)
    values(argv)
    return values.config


def test_a_workdir_alone_gives_the_config_of_its_run(saved, monkeypatch):
    cfg, workdir, _ = saved
    assert parse_flags(monkeypatch, f'--workdir={workdir}').to_dict() == cfg.to_dict()
    assert parse_flags(monkeypatch, '-workdir', str(workdir), '--step=2').to_dict() == cfg.to_dict()
    other = parse_flags(monkeypatch, f'--workdir={workdir}', '--config.eval.split=test')
    cfg = cfg.copy_and_resolve_references()
    cfg.eval.split = 'test'
    assert other.to_dict() == cfg.to_dict()


def test_the_config_comes_from_an_older_checkpoint_if_the_newest_is_damaged(
    saved, monkeypatch, tmp_path
):
    """Only with --fallback, which used to be rejected before it was read."""
    cfg, workdir, _ = saved
    shutil.copytree(workdir, tmp_path / 'run')
    mark = tmp_path / 'run' / 'checkpoints' / '4' / checkpoint.MARK
    mark.write_text('')
    words = (f'--workdir={tmp_path / "run"}',)
    with pytest.raises(SystemExit, match=f'error: checkpoint 4 is damaged: {mark} .* step 2'):
        saved_config.default(['program', *words])
    for flag in ('--fallback', '--fallback=true'):
        file, _, folder = saved_config.default(['program', *words, flag]).partition(':')
        assert folder.endswith('checkpoints/2')
    monkeypatch.setenv(usage.FALLBACK, '1')
    assert parse_flags(monkeypatch, *words).to_dict() == cfg.to_dict()


def test_a_workdir_without_a_run_is_a_one_line_error(tmp_path, monkeypatch, saved, capsys):
    """A missing folder was reported as one without a checkpoint; both had exit code 1."""
    for folder, words in ((tmp_path, 'no finished checkpoint'), (tmp_path / 'x', 'no such folder')):
        with pytest.raises(SystemExit) as ended:
            parse_flags(monkeypatch, f'--workdir={folder}')
        err = capsys.readouterr().err
        assert ended.value.code == 2 and words in err and str(folder) in err
        assert len(err.splitlines()) == 1
    with pytest.raises(SystemExit):
        parse_flags(monkeypatch, f'--workdir={saved[1]}', '--step', '3')
    assert 'no checkpoint of step 3; there are 2, 4' in capsys.readouterr().err


def test_settings_of_a_game_come_from_its_run(saved, monkeypatch):
    run = {'config': {'env': {'name': 'catch'}, 'catch': {'rows': 5, 'short': True}}}
    monkeypatch.setattr(checkpoint, 'read_extra', lambda path: run)
    cfg = parse_flags(monkeypatch, f'--workdir={saved[1]}', '--config.catch.rows=7')
    assert cfg.env.name == 'catch' and cfg.catch.short and cfg.catch.rows == 7


def test_evaluate_and_export_name_the_checkpoint(saved, tmp_path, capsys):
    cfg, workdir, _ = saved
    evaluate.evaluate(cfg, str(workdir), str(tmp_path), None)
    out = capsys.readouterr().out
    digest = files.config_hash(as_json(cfg))
    assert f'checkpoint  step 4 of {workdir}, config {digest[:12]}, commit ' in out
    record = json.loads((tmp_path / 'evaluation_validation.json').read_text())
    assert record['checkpoint'] == {
        'workdir': str(workdir),
        'step': 4,
        'config_hash': digest,
        'commit': about.commit(),
    }
    export.export_checkpoint(
        cfg, str(workdir), str(tmp_path / 'out'), step=2, dtype='float32', part='policy'
    )
    out = capsys.readouterr().out
    assert f'checkpoint  step 2 of {workdir}' in out
    assert f'`{workdir}`, step 2 of 3' in (tmp_path / 'out' / 'README.md').read_text()


def test_another_architecture_is_neither_evaluated_nor_exported(saved, tmp_path):
    """Arrays of four heads have the same shapes as of two: an export had two in its config.json."""
    cfg, workdir, _ = saved
    changed = cfg.copy_and_resolve_references()
    changed.model.num_heads *= 2
    changed.model.rope_theta = 50.0
    with pytest.raises(ValueError, match='model.num_heads: .* model.rope_theta: .*50.0 now'):
        export.export_checkpoint(
            changed, str(workdir), str(tmp_path / 'out'), step=None, dtype='float32'
        )
    with pytest.raises(ValueError, match='model.num_heads'):
        evaluate.evaluate(changed, str(workdir), str(tmp_path), None, transfer=True)


@pytest.fixture(scope='module')
def adapted(saved, tmp_path_factory):
    """(config, workdir) of adapters on a base in a folder."""
    cfg, workdir, _ = saved
    folder = tmp_path_factory.mktemp('base') / 'model'
    export.export_checkpoint(cfg, str(workdir), str(folder), step=2, dtype='float32')
    on_base = {'model.path': str(folder), 'lora.rank': 2}
    cfg = micro_runs.config('frozen_lake', **CHANGES | {'model.scan_layers': None} | on_base)
    workdir = tmp_path_factory.mktemp('adapted')
    resume(cfg, workdir)
    return cfg, workdir


def resume(cfg, workdir):
    """Start or resume the run."""
    checkpoints = checkpoint.open_checkpoints(workdir, keep=3)
    try:
        start.restore_or_init(build(cfg), checkpoints)
    finally:
        checkpoint.close(checkpoints)


def load(cfg, workdir):
    """Load the policy as commands do."""
    run = build(cfg)
    return params.saved_policy(run.config, run.model, run.mesh, run.params, str(workdir))


def with_copied_base(adapted, to):
    """Return the config with a copy of the base in another folder."""
    cfg, _ = adapted
    cfg = cfg.copy_and_resolve_references()
    shutil.copytree(cfg.model.path, to)
    cfg.model.path = str(to)
    return cfg


@pytest.mark.soak
def test_adapters_load_only_on_the_base_that_they_were_trained_on(adapted, tmp_path):
    """Any model.path with the same shapes was silently accepted."""
    cfg, workdir = adapted
    resume(cfg, workdir)
    other = with_copied_base(adapted, tmp_path / 'other')
    first, second = load(cfg, workdir), load(other, workdir)  # the same parameters elsewhere
    jax.tree.map(np.testing.assert_array_equal, first, second)
    file = tmp_path / 'other' / 'model.safetensors'
    tensors = load_file(file)
    tensors['model.norm.weight'] *= 1.5
    save_file(tensors, file, metadata={'format': 'pt'})
    words = f"{other.model.path}' holds different parameters than model.path='{cfg.model.path}' did"
    with pytest.raises(ValueError, match=words):
        load(other, workdir)
    shutil.copytree(cfg.model.path, tmp_path / 'kept')
    shutil.copy(file, cfg.model.path)
    try:
        with pytest.raises(ValueError, match=f"{cfg.model.path}' holds different parameters"):
            resume(cfg, workdir)
    finally:
        shutil.copytree(tmp_path / 'kept', cfg.model.path, dirs_exist_ok=True)


def test_a_checkpoint_with_another_rope_theta_is_rejected(adapted, tmp_path, monkeypatch):
    """Tensors do not depend on rope_theta and rms_norm_eps in config.json."""
    _, workdir = adapted
    other = with_copied_base(adapted, tmp_path / 'other')
    file = tmp_path / 'other' / 'config.json'
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {'rms_norm_eps': float(np.float32(1e-6))}))
    load(other, workdir)  # as stored in a .gguf
    file.write_text(json.dumps(fields | {'rope_theta': 50.0, 'rms_norm_eps': 1e-5}))
    words = 'rope_theta is 50.0, was 1000000.0; rms_norm_eps is 1e-05, was 1e-06'
    with pytest.raises(ValueError, match=words):
        load(other, workdir)
    monkeypatch.setattr(start, 'CHANGEABLE_ON_RESUME', (*start.CHANGEABLE_ON_RESUME, 'model.path'))
    with pytest.raises(ValueError, match=words):
        resume(other, workdir)


def test_checkpoints_of_older_versions_have_no_record_of_the_model(adapted, tmp_path, monkeypatch):
    _, workdir = adapted
    other = with_copied_base(adapted, tmp_path / 'other')
    fields = json.loads((tmp_path / 'other' / 'config.json').read_text()) | {'rope_theta': 50.0}
    (tmp_path / 'other' / 'config.json').write_text(json.dumps(fields))
    extra = checkpoint.read_extra(workdir)
    assert extra.keys() >= {'sizes', 'base'}
    older = {name: extra[name] for name in ('config', 'version')}
    monkeypatch.setattr(checkpoint, 'read_extra', lambda path, step=None: older)
    load(other, workdir)


def test_a_policy_uses_the_tokenizer_of_its_run_in_other_worlds(saved):
    """Each environment has a tokenizer, and its vocabulary belonged to another model."""
    cfg, workdir, _ = saved
    other_cfg = cfg.copy_and_resolve_references()
    other_cfg.env.name = 'babyai'
    changed = evaluate.with_tokenizer_of_run(other_cfg, str(workdir), None)
    assert changed.model.tokenizer == str(loading.BUNDLED_TOKENIZER)
    assert other_cfg.model.tokenizer == ''
    other_cfg.model.tokenizer = 'own.model'
    assert evaluate.with_tokenizer_of_run(other_cfg, str(workdir), None) is other_cfg


def test_parameters_that_are_not_finite_are_neither_evaluated_nor_exported(saved, tmp_path):
    cfg, _, dead = saved
    message = f'step 3 of {dead}: nan or infinity in 14 of 14 tensors: model.embed_tokens'
    with pytest.raises(ValueError, match=message):
        evaluate.evaluate(cfg, str(dead), str(tmp_path), None)
    with pytest.raises(ValueError, match=message):
        export.export_checkpoint(cfg, str(dead), str(tmp_path / 'x'), step=None, dtype='float32')
    assert not (tmp_path / 'x').exists()


def test_the_commit_is_that_of_the_checkout_of_the_code(tmp_path):
    def git(*arguments):
        who = ('-c', 'user.name=a', '-c', 'user.email=a@b')
        subprocess.run(['git', '-C', str(tmp_path), *who, *arguments], check=True)

    commit = about.commit.__wrapped__  # without its cache
    git('init', '-q')
    code = tmp_path / 'venv' / 'code.py'
    code.parent.mkdir()
    code.write_text('1')
    assert commit(code.parent) is None  # in a checkout that does not track it
    git('add', '.')
    git('commit', '-qm', 'x')
    clean = commit(code.parent)
    code.write_text('2')
    assert len(clean) == 40 and commit(code.parent) == f'{clean}-modified'
