"""Sweep files, resolved configs, names and commands, and the command line without training."""

import ast
import hashlib
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import ml_collections
import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import config_dict, config_flags
from waiting import until

from agentrl_jax import sweep
from agentrl_jax.run import command
from agentrl_jax.run.config import effective
from agentrl_jax.sweeps import spec, status
from agentrl_jax.sweeps.options import define_flags
from agentrl_jax.sweeps.spec import Hyper as h
from configs import base

pytestmark = pytest.mark.filterwarnings('ignore:the load_module')
ROOT = pathlib.Path(spec.__file__).parents[2]


def expand(*listed, **more):
    return spec.expand(base.get_config(), listed, source='s.py', **more)


def write(folder, text):
    path = folder / 'listed.py'
    path.write_text(text)
    return path


# ---- sweep files -------------------------------------------------------------------------------


def test_zip_and_chain_by_hand():
    a, b = h.sweep('a', [1, 2]), h.sweep('b', 'xy')
    assert h.zip([a, b]) == [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'y'}]
    assert h.chain([a, b]) == [{'a': 1}, {'a': 2}, {'b': 'x'}, {'b': 'y'}]
    for clash in (lambda: h.zip([a, h.sweep('b', range(3))]), lambda: h.product([a, a])):
        with pytest.raises(ValueError):
            clash()


@given(st.lists(st.integers(0, 4), max_size=4))
def test_a_product_has_every_combination_once_in_order(lengths):
    sweeps = [h.sweep(f'f{i}', range(n)) for i, n in enumerate(lengths)]
    combinations = [tuple(overrides.values()) for overrides in h.product(sweeps)]
    assert combinations == list(itertools.product(*map(range, lengths)))


ADDED = """
def sweep(add):
    for clip in (0.2, 0.28):
        for seed in range(2):
            add({'loss.clip_high': clip}, seed=seed)
"""
LISTED = """
def get_hyper(hyper):
    seeds = hyper.sweep('config.seed', range(2))
    return hyper.product([hyper.sweep('loss.clip_high', (0.2, 0.28)), seeds])
"""


def test_both_forms_of_a_sweep_file_give_the_same_runs(tmp_path):
    added, listed = (spec.load(write(tmp_path, text)) for text in (ADDED, LISTED))
    assert added[1] == {'loss.clip_high': 0.2, 'seed': 1} and len(added) == 4
    assert expand(*added) == expand(*listed)


@pytest.mark.parametrize('text', ['def other(add): pass', 'def get_hyper(h): return None'])
def test_a_file_without_a_sweep_is_rejected(tmp_path, text):
    for path in (write(tmp_path, text), tmp_path / 'missing.py', tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            spec.load(path)


# ---- resolved configs --------------------------------------------------------------------------


def test_overrides_have_the_types_of_the_config():
    (run,) = expand({'optim.lr': np.float32(0.5), 'loss.kl_coef': 1, 'seed': np.int64(3)})
    assert run.overrides == {'optim.lr': 0.5, 'loss.kl_coef': 1.0, 'seed': 3}
    assert [type(value) for value in run.overrides.values()] == [float, float, int]
    assert run.config['optim']['lr'] == 0.5 and run.steps == base.get_config().steps
    full = base.get_config()
    full.update_from_flattened_dict(run.overrides)
    assert run.config == json.loads(effective(full).to_json_best_effort())


@pytest.mark.parametrize(
    'overrides, field',
    [
        ({'loss.clip_hihg': 0.2}, 'mean loss.clip_high'),
        ({'seed': True}, 'seed=True'),
        ({'algorithm': 'ppoo'}, 'algorithm'),
        ({'seed': 5, 'loss.kl_coef': 0}, 'run 1'),  # already the value in this config
        ({'steps': 3, 'seed': 1}, 'steps'),
    ],
)
def test_an_invalid_run_is_rejected_with_its_file_and_field(overrides, field):
    with pytest.raises(ValueError, match=f's.py, run 2.*{field}'):
        expand({'seed': 5}, overrides, taken=['steps', 'agent.name'])


def test_fields_that_reference_others_are_resolved():
    cfg = ml_collections.ConfigDict({'rows': config_dict.FieldReference(4)})
    cfg.batch = cfg.get_ref('rows') * 16
    resolved, values = spec.resolve(cfg.lock(), {'rows': 8}, 'here')
    assert (resolved.batch, cfg.batch, values) == (128, 64, {'rows': 8})


# ---- names -------------------------------------------------------------------------------------


def test_a_name_is_the_overrides_and_the_hash_of_the_config():
    """The hash is sha256 over the sorted JSON, so it is the same on every machine."""

    for overrides, name in (
        ({}, 'base-0123456789'),
        ({'optim.lr': 1e-6, 'clone.lr': 0.1}, 'optim.lr=1e-06,clone.lr=0.1-0123456789'),
        ({'model.path': '/data/Qwen2.5-0.5B/'}, 'path=Qwen2.5-0.5B-0123456789'),
        ({'sokoban.symbols': '#_O √'}, 'symbols=O-0123456789'),
    ):
        assert spec.run_names([overrides], ['0123456789abcdef']) == [name]
    (run,) = expand({'loss.clip_high': 0.28, 'seed': 1})
    text = json.dumps(run.config, sort_keys=True, separators=(',', ':'))
    assert run.name == 'clip_high=0.28,seed=1-' + hashlib.sha256(text.encode()).hexdigest()[:10]
    assert expand({'seed': 1, 'loss.clip_high': 0.28})[0].name[-10:] == run.name[-10:]


def test_names_keep_fields_that_differ_between_runs_and_omit_shared_fields():
    """Previously names were cut at 80 characters, before the fields that differ between runs."""
    shared = {f'group.shared_{number}': 'a' * 20 for number in range(9)}
    listed = [{'seed': 0, **shared, 'loss.coef': x, 'b.same': 1} for x in (0.1, 0.2)]
    assert spec.run_names(listed, 'xy') == ['seed=0,coef=0.1-x', 'seed=0,coef=0.2-y']


def test_a_sweep_keeps_the_folders_of_its_runs_when_their_names_change(tmp_path, cli, capsys):
    """Previously a longer sweep, or a version with other names, trained finished runs again."""
    old = expand({'seed': 1})[0]
    folder = tmp_path / f'base_and_more-{old.name.rpartition("-")[2]}'
    folder.mkdir()
    (folder / 'run.json').write_text('{}')
    path = write(tmp_path, 'def sweep(add):\n    add({"seed": 1})\n    add({"seed": 2})\n')
    words = ['--config=configs/base.py', f'--sweep={path}', f'--workdir={tmp_path}']
    assert cli(*words, '--launcher=print') == 0
    first, second = capsys.readouterr().out.splitlines()
    assert f'--workdir={folder} ' in first and f'--workdir={tmp_path}/seed=2-' in second
    assert cli(*words, '--launcher=print', f'--only={folder.name}') == 0


@settings(max_examples=40)
@given(
    st.lists(
        st.dictionaries(
            st.from_regex(r'[a-z_]+(\.[a-z_]+)?', fullmatch=True),
            st.text() | st.floats() | st.integers(),
            max_size=12,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_every_name_is_a_short_folder_name(listed):
    for name in spec.run_names(listed, ['0' * 64] * len(listed)):
        assert re.fullmatch(r'[A-Za-z0-9._+=,-]+', name) and len(name) <= 91


# ---- commands ----------------------------------------------------------------------------------

CONFIG = """
import ml_collections
def get_config():
    return ml_collections.ConfigDict({
        'b': False, 'i': 0, 'f': 0.0, 's': '', 't': (1,), 'group': {'s': 'x', 'f': 0.5},
    })
"""
TEXT = st.text(st.characters(exclude_characters='\0\n\r', exclude_categories=['Cs']))
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    'b': st.booleans(),
    'i': st.integers(),
    's': TEXT,
    'group.s': TEXT,
    'f': st.floats(allow_nan=False, allow_infinity=False),
    'group.f': st.floats(allow_nan=False, allow_infinity=False),
    't': st.lists(NUMBER | TEXT | st.booleans() | st.tuples(NUMBER, TEXT)).map(tuple),
}


def parse(config_file, words):
    """Return the config that a program gets from its command line."""
    argv = ['train', f'--config={config_file}', *words]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', None, '', flag_values=values, sys_argv=argv)
    values(argv)
    return values.config


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_command_reproduces_the_values(tmp_path_factory, overrides):
    """Negative numbers, tuples, booleans, empty and odd strings, also with shell quoting."""
    path = tmp_path_factory.getbasetemp() / 'small_config.py'
    if not path.exists():
        path.write_text(CONFIG)
    resolved, values = spec.resolve(parse(path, []), overrides, 'here')
    run = status.Run('name', values, {}, 1)
    words = spec.command(run, 'c.py', 'runs/x', {})
    assert words[3:5] == ['--config=c.py', '--workdir=runs/x/name']
    parsed = parse(path, shlex.split(shlex.join(words))[5:])
    # repr distinguishes 1 from 1.0 and True
    assert repr(parsed.to_dict()) == repr(resolved.to_dict())


# ---- progress ----------------------------------------------------------------------------------


def test_progress_by_hand():
    """Steps 10 and 14 are logged 8 s from each other: 2 s per step, and 5 of 20 steps remain."""
    rows = [
        {'step': 10, 'time_s': 30.0, 'eval/success': 0.5, 'rollout/success': 0.1},
        {'step': 14, 'time_s': 38.0, 'rollout/success': 0.2},
    ]
    assert status.progress(rows, 20) == (15, 0.5, 10.0)
    assert status.progress(rows[1:], 20) == (15, 0.2, None)
    assert status.progress([], 20) == (0, None, None)


# ---- folders and launchers ---------------------------------------------------------------------


def test_every_run_gets_a_run_json_and_other_runs_are_left_alone(tmp_path):
    runs = expand({'seed': 1}, {'seed': 2})
    root, others = sweep.prepare(f'{tmp_path}/w/', runs, 'c.py', {'steps': 3})
    assert root == tmp_path / 'w' and others == ''
    document = json.loads((root / runs[1].name / 'run.json').read_text())
    assert document['overrides'] == {'seed': 2} and document['config'] == runs[1].config
    assert document['command'] == (
        f'python -m agentrl_jax.train --config=c.py --workdir={root}/{runs[1].name} '
        '--config.steps=3 --config.seed=2'
    )
    _, others = sweep.prepare(str(root), expand({'seed': 9}), 'c.py', {})
    assert runs[0].name in others
    assert len(list(root.glob('*/run.json'))) == 3
    (tmp_path / 'metrics.jsonl').touch()
    with pytest.raises(ValueError, match=str(tmp_path)):
        sweep.prepare(str(tmp_path), expand({}), 'c.py', {})


def test_gpus_are_divided_among_jobs():
    gpus = [slot['CUDA_VISIBLE_DEVICES'] for slot in sweep.slots(2, '0,1,4,5')]
    assert gpus == ['0,1', '4,5'] and sweep.slots(2, '') == [{}, {}]


def test_runs_are_selected_by_names_prefixes_and_values():
    algorithms, seeds = h.sweep('algorithm', ['ppo', 'grpo']), h.sweep('seed', [1, 10])
    runs = expand(*h.product([algorithms, seeds, h.sweep('optim.lr', [1e-3, 0.5])]))

    def pick(*only):
        return [tuple(run.overrides.values()) for run in sweep.chosen(runs, only)]

    every = pick()
    assert len(every) == 8 and pick(runs[3].name) == [every[3]]
    assert pick('algorithm=grpo') == [x for x in every if x[0] == 'grpo']
    assert pick('seed=1') == [x for x in every if x[1] == 1]  # seed 10 does not match
    assert pick('lr=1e-3,seed=10') == [x for x in every if x[1:] == (10, 1e-3)]
    assert pick('optim.lr=0.500') == [x for x in every if x[2] == 0.5]
    assert pick('algorithm=ppo,seed=1,') == [x for x in every if x[:2] == ('ppo', 1)]
    assert pick('seed=1', 'seed=10', runs[0].name) == every  # each once, in the sweep's order
    assert pick('env.think=true') == every
    for selector in ('seed=2', 'grpo', ''):
        with pytest.raises(ValueError, match=f'--only={selector} '):
            sweep.chosen(runs, [selector])


def test_a_line_break_cannot_start_a_second_command(capsys):
    """A shell that reads line by line would run the second half as a separate command."""
    (run,), (plain,) = expand({'model.path': 'weights\ntouch gone'}), expand({'seed': 1})
    for broken, common in ((run, {}), (plain, {'model.path': 'a\rb'})):
        with pytest.raises(ValueError, match='model.path'):
            sweep.print_commands([broken], 'c.py', 'runs', common)
    for words, options in ((['a\nb'], []), (['a'], ['--x\nrm'])):
        with pytest.raises(ValueError):
            sweep.slurm_script([plain], pathlib.Path('runs'), words, jobs=1, options=options)
    assert capsys.readouterr().out == ''


PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(os.environ['SAID'], 'w').write(repr(sys.argv[1:]))
time.sleep(240)
"""


def test_a_slurm_task_trains_its_run_and_is_requeued_when_stopped(tmp_path):
    """Run the script in bash, with a program that records its arguments and a fake scontrol."""
    runs = expand(*h.sweep('seed', range(3)))
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    words = [sys.executable, '-S', str(program), "--workdir=it's here"]
    script = sweep.slurm_script(runs, tmp_path, words, jobs=2, options=['--gres=gpu:1'])
    assert '#SBATCH --array=0-2%2\n' in script and '#SBATCH --gres=gpu:1\n' in script
    control = tmp_path / 'scontrol'
    control.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/requeued"\n')
    control.chmod(0o755)
    record = tmp_path / 'said'
    task = subprocess.Popen(
        ['bash', '-c', script],
        env=os.environ
        | {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SAID': str(record)}
        | {'SLURM_ARRAY_TASK_ID': '1', 'SLURM_ARRAY_JOB_ID': '77'},
    )
    until(lambda: record.exists() and record.read_text())
    task.terminate()
    assert task.wait(240) == 75
    chosen = ['--launcher=local', '--jobs=1', f'--only={runs[1].name}']
    assert ast.literal_eval(record.read_text()) == [words[-1], *chosen]
    assert (tmp_path / 'requeued').read_text() == 'requeue 77_1\n'


# ---- the command line --------------------------------------------------------------------------


@pytest.fixture
def cli(monkeypatch):
    """Return cli(*words) -> exit code, which runs the command line in this process."""

    def run(*words):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, 'argv', ['sweep', *words])
        values = flags.FlagValues()
        define_flags(values)
        values(sys.argv)
        return sweep.run_sweep(values)

    return run


DEMO = ('--config=configs/demo.py', '--sweep=configs/sweeps/demo_algorithms.py')


@pytest.mark.soak
def test_print_gives_one_shell_line_per_run_without_files_or_a_backend(tmp_path):
    """A sweep that starts a backend other than CPU would take a TPU from its runs."""
    workdir = tmp_path / 'my runs'
    words = [*DEMO, f'--workdir={workdir}', '--launcher=print', '--config.steps=7']
    done = subprocess.run(
        [sys.executable, '-m', 'agentrl_jax.sweep', *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {'JAX_PLATFORMS': 'nonesuch'},
    )
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(lines) == 15 and not workdir.exists()
    assert lines[4][:4] == [sys.executable, '-m', 'agentrl_jax.train', '--config=configs/demo.py']
    assert lines[4][4].startswith(f'--workdir={workdir}/algorithm=grpo,seed=1,')
    overrides = ['algorithm=grpo', 'seed=1', 'loss.kl_coef=0.0', 'loss.aggregation=token_mean']
    assert lines[4][5:] == [f'--config.{word}' for word in ['steps=7', *overrides]]


def test_slurm_writes_a_script_of_sweeps_of_one_run_and_submits_it(
    tmp_path, cli, capsys, monkeypatch
):
    workdir = tmp_path / 'w'
    words = (*DEMO, f'--workdir={workdir}', '--launcher=slurm', '--config.steps=7')
    assert cli(*words) == 0
    assert capsys.readouterr().out == f'sbatch {workdir}/sweep.sbatch\n'
    script = (workdir / 'sweep.sbatch').read_text()
    line = shlex.split(next(x for x in script.splitlines() if 'agentrl_jax.sweep' in x))
    assert line[3:8] == [*DEMO, f'--workdir={workdir}', '--retries=2', '--config.steps=7']
    assert len(list(workdir.glob('*/run.json'))) == 15
    monkeypatch.setenv('PATH', str(tmp_path))
    sbatch = tmp_path / 'sbatch'
    sbatch.write_text(f'#!/bin/sh\necho "$@" $JAX_PLATFORMS > {tmp_path}/submitted; exit 4\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    for chosen, platform in ((True, ' cpu'), (False, '')):  # False: only this process uses the CPU
        monkeypatch.setattr(command, 'PLATFORM_WAS_SET', chosen)
        assert cli(*words, '--submit') == 4
        assert (tmp_path / 'submitted').read_text() == f'{workdir}/sweep.sbatch{platform}\n'


@pytest.mark.parametrize(
    'words, field',
    [
        (('--workdir=/dev/null/x',), 'workdir'),
        (('--workdir=x', '--launcher=slurm', '--gpus=1'), '--gpus'),
        (('--workdir=x', '--jobs=2', '--gpus=0,1,2'), '--jobs=2'),
        (('--workdir=x', '--config.seed=4'), 'seed'),
    ],
)
def test_wrong_use_is_an_error_that_names_the_field(cli, words, field):
    with pytest.raises((ValueError, OSError, flags.Error), match=field):
        cli(*DEMO, *words)
    assert not (ROOT / 'x').exists()
