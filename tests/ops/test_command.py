"""Invalid command lines give a one-line error before anything heavy is imported."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import textwrap
import tomllib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import micro_runs
import pytest
from absl import flags
from ml_collections import config_flags

from agentrl_jax import train
from agentrl_jax.machine import checkpoint, files, processes
from agentrl_jax.records import report
from agentrl_jax.run import build, command, interrupts, usage

CONFIG = '--config=configs/demo.py'


def run_process(*words):
    """Run a process; return (exit code, stdout, stderr)."""
    done = subprocess.run(words, cwd=micro_runs.ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def run_python(program, *words):
    return run_process(sys.executable, '-c', program, *words)


def run_command(module, *words, watch='jax'):
    """Return (exit code, stdout, stderr, whether `watch` was imported; jax: started)."""
    running = "bool(sys.modules['jax._src.xla_bridge']._backends)" if watch == 'jax' else True
    code = textwrap.dedent(
        f"""
        import atexit, runpy, sys
        sys.argv = [{module!r}, *{list(words)!r}]
        atexit.register(lambda: print('IMPORTED', {watch!r} in sys.modules and {running}))
        runpy.run_module('agentrl_jax.' + {module!r}, run_name='__main__', alter_sys=True)
        """
    )
    code, out, err = run_python(code)
    out, _, imported = out.rpartition('IMPORTED ')
    return code, out, err, imported.strip() == 'True'


@pytest.mark.parametrize(
    'words, code', [(['--help'], 0), (['--workdir=w', CONFIG, 'config.steps=3'], usage.EXIT_USAGE)]
)
def test_help_and_a_wrong_command_line_do_not_import_jax(words, code):
    exit_code, out, err, imported = run_command('train', *words)
    assert exit_code == code and not imported
    if code:
        assert not out and 'config.steps=3' in err and len(err.splitlines()) == 1
    else:
        assert not err and '--config: Config' in out and 'python -m agentrl_jax.train' in out


@pytest.fixture
def usage_error(monkeypatch, capsys):
    """Return a function: words of an invalid command line -> its error; checks the exit code."""

    def usage_error(*words, needs=('config', 'workdir')):
        values = flags.FlagValues()
        config_flags.DEFINE_config_file('config', None, 'Config.', flag_values=values)
        flags.DEFINE_string('workdir', None, 'Folder of the run.', flag_values=values)
        flags.DEFINE_integer('port', 0, 'Port.', 0, 65535, flag_values=values)
        flags.DEFINE_bool('show_config', False, 'Print the config.', flag_values=values)
        monkeypatch.setattr(command.flags, 'FLAGS', values)
        argv = ['train', *command.underscored(words)]
        monkeypatch.setattr(sys, 'argv', argv)
        with pytest.raises(SystemExit) as ended:
            command.parse(argv, needs)
        out, err = capsys.readouterr()
        assert ended.value.code == usage.EXIT_USAGE and not out
        assert err.startswith('error: ') and len(err.splitlines()) == 1
        return err

    return usage_error


MISTAKES = {
    ('configs/demo.py', '--workdir=w'): 'configs/demo.py',
    (CONFIG,): '--workdir',
    (CONFIG, '--work-dir=w'): 'workdir',
    (CONFIG, '--config.temperature=1'): 'mean eval.temperature or rollout.temperature',
    (CONFIG, '--config.steps=1.5'): '--config.steps=1.5',
    (CONFIG, '--config.optim=3'): 'optim',
    (CONFIG, '--port=70000'): 'port',
    ('--config=configs/dmeo.py',): 'configs/dmeo.py',
    ('--config=configs',): '--config=configs',
}


def test_a_wrong_override_of_a_saved_config_is_a_one_line_error(monkeypatch, capsys):
    """Previously evaluate, export and serve_policy ended with a traceback of ml_collections."""
    define = config_flags.DEFINE_config_file
    define = functools.partial(define, flag_values=flags.FlagValues())
    monkeypatch.setattr(command.config_flags, 'DEFINE_config_file', define)
    monkeypatch.setattr(command, 'config_of_run', lambda: str(micro_runs.ROOT / 'configs/demo.py'))
    monkeypatch.setattr(sys, 'argv', ['evaluate', '--config.eval.sampls=3'])
    with pytest.raises(SystemExit) as ended:
        command.define_config_of_run()
    assert ended.value.code == usage.EXIT_USAGE
    err = capsys.readouterr().err
    assert 'eval.sampls' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize('words', MISTAKES)
def test_a_mistyped_command_line_is_a_one_line_error(usage_error, words):
    assert MISTAKES[words] in usage_error(*words)


def test_hyphens_and_underscores_spell_the_same_flags(usage_error):
    usage_error(CONFIG, '--xyz')  # defines flags
    words = ['--show-config', '--config.batch-x=a-b', '--a-b=c', '-5', 'a-b']
    expected = ['--show_config', '--config.batch_x=a-b', '--a-b=c', '-5', 'a-b']
    assert command.underscored(words) == expected


BODY = 'from configs import base\ndef get_config():\n'


@pytest.mark.parametrize(
    'text, words',
    [
        ('x = 1\ndef get_config()\n    return 3\n', 'c.py, line 2: '),
        (BODY + "    {}['rate']\n", "c.py, line 3: KeyError: 'rate'"),
        (BODY + "    return {'steps': 3}\n", 'c.py: '),
    ],
)
def test_an_error_in_a_config_file_is_a_one_line_error(usage_error, tmp_path, text, words):
    """Previously a syntax error was 47 lines with exit code 1."""
    (tmp_path / 'c.py').write_text(text)
    err = usage_error(f'--config={tmp_path / "c.py"}', '--workdir=w')
    assert words in err and str(tmp_path) in err


def test_usage_errors_are_not_failures_of_the_program():
    for error in (ValueError('no'), FileNotFoundError(2, 'No such file', '/nope')):
        with pytest.raises(usage.WrongUsage, match='no|/nope'), usage.checked():
            raise error
    for error in (files.Failure('lost'), OSError(28, 'No space left')):
        with pytest.raises(type(error)) as ended, usage.checked():
            raise error
        assert usage.code_of(ended.value) == 1
    assert usage.code_of(PermissionError(13, 'no', '/x')) == usage.EXIT_USAGE


def test_a_config_file_imports_its_neighbours_from_any_folder(tmp_path):
    site = tmp_path / 'site'  # like site-packages: contains agentrl_jax but not configs
    site.mkdir()
    (site / 'agentrl_jax').symlink_to(micro_runs.ROOT / 'agentrl_jax')
    program = (
        'from absl import flags; from ml_collections import config_flags; '
        'from agentrl_jax.run import command; '
        "config_flags.DEFINE_config_file('config'); command.begin(''); "
        'print(flags.FLAGS.config.env.name)'
    )
    done = subprocess.run(
        [sys.executable, '-c', program, f'--config={micro_runs.ROOT}/configs/demo.py'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(site)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == 'frozen_lake\n', done.stderr


STARTING = """
import hashlib, os, signal, sys, time
from agentrl_jax.run import interrupts
interrupts.exit_on_signals()
if sys.argv[1] == 'starting':
    from agentrl_jax import train
if sys.argv[1] == 'training':
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os.write(1, b'heard\\n'))  # print may be interrupted
print('ready', flush=True)
if sys.argv[1] == 'native':  # as in a compilation no handler runs, but other threads do
    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
while True:
    time.sleep(1)
"""


def test_a_second_ctrl_c_stops_children_before_the_process_exits(monkeypatch):
    done = []
    monkeypatch.setattr(interrupts, 'LAST', [lambda: done.append('asked')])
    monkeypatch.setattr(interrupts, '_leave', lambda *words: done.append(words[1]))
    monkeypatch.setattr(interrupts.signal, 'getsignal', lambda number: None)  # as in training
    reader, writer = os.pipe()
    os.write(writer, bytes([signal.SIGINT] * 2))
    os.close(writer)
    interrupts._listen(reader)
    os.close(reader)
    assert done == ['asked', interrupts.EXIT_KILLED]


@contextlib.contextmanager
def running(program, *words):
    """Start a process of the program and wait until it has printed 'ready'."""
    process = subprocess.Popen(
        [sys.executable, '-c', program, *words],
        cwd=micro_runs.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == 'ready\n'
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.soak
@pytest.mark.parametrize('phase, number', [('starting', signal.SIGTERM), ('native', signal.SIGINT)])
def test_a_signal_during_start_up_ends_a_run_at_once_as_resumable(phase, number):
    with running(STARTING, phase) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 75 and len(err.split('\n')) == 3


def test_a_stopped_run_reports_whether_anything_is_saved(tmp_path):
    """Previously it printed 'resumes from what was saved' when nothing was saved."""
    argvs = [
        ['/x/agentrl_jax/train.py', '--config=c.py', *form.format(tmp_path).split(' ')]
        for form in ('--workdir={}', '-workdir={}', '--workdir {}')
    ]
    for argv in argvs:
        assert 'nothing is saved' in interrupts.what_is_left(argv)
    assert 'before anything was saved' in report.stopped(tmp_path, 'python x')
    for name in ('8', '12', '14.orbax-checkpoint-tmp'):
        (tmp_path / 'checkpoints' / name).mkdir(parents=True)
    for argv in argvs:
        assert 'step 12 is saved' in interrupts.what_is_left(argv)
    assert 'step 12 is saved' in report.stopped(tmp_path, 'python x')
    for unknown in (['sweep.py', *argvs[0][1:]], argvs[0][:2], ['train.py', '--workdir=gs://b/r']):
        assert 'what was saved' in interrupts.what_is_left(unknown)


STOPPING = """
import hashlib, sys
from agentrl_jax.run import interrupts
interrupts.exit_on_signals()
from agentrl_jax.machine import processes
preemption = processes.Preemption(silent=interrupts.listens())
with preemption, interrupts.answering(preemption.notice):
    preemption.phase = 'the rollout of step 12'
    print('ready', flush=True)
    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # no Python handler runs
"""


def test_the_first_signal_is_acknowledged_while_native_code_runs():
    with running(STOPPING) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == '\n'
        assert 'the rollout of step 12' in process.stderr.readline()
        assert process.poll() is None


def test_during_training_only_a_second_ctrl_c_ends_the_process():
    with running(STARTING, 'training') as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            assert process.stdout.readline() in ('heard\n', 'heard', '')
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and 'interrupted twice' in err


LISTENING = """
import os, signal
from agentrl_jax.machine import processes
with processes.Preemption() as preemption:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    print('goes on', preemption.requested, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print('never said')
"""


def test_a_second_ctrl_c_ends_a_saving_command_without_a_traceback():
    """Previously: a KeyboardInterrupt of 65 lines; a Ctrl-C after SIGTERMs counted as second."""
    code, out, err = run_python(LISTENING)
    assert (code, out) == (130, 'goes on True\n')
    assert len(err.split('\n')[1::2]) == 2 and 'the start' in err


def test_signals_during_the_last_save_do_not_end_the_process(tmp_path, monkeypatch):
    """Launchers repeat SIGTERM. Previously the second one ended the process before the save."""
    signals, saved = [], []
    state = types.SimpleNamespace(step=jnp.int32(3))
    cfg = types.SimpleNamespace(
        seed=0,
        lora=types.SimpleNamespace(rank=1),
        checkpoint=types.SimpleNamespace(keep=1),
        env=types.SimpleNamespace(worlds=('frozen_lake',), eval_levels=8),
    )
    model = types.SimpleNamespace(param_count=lambda: 0)
    run = types.SimpleNamespace(config=cfg, config_dict=cfg, pools=(), model=model)

    def save(checkpoints, step, *_):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        saved.append(step)

    monkeypatch.setattr(train, 'build', lambda cfg: run)
    monkeypatch.setattr(train, 'disk_bytes_needed', lambda *_: 0)
    monkeypatch.setattr(train.recorder, 'write_reference', lambda *_: None)
    monkeypatch.setattr(train.recorder, 'report_end', lambda *_: None)
    checkpoints = checkpoint.open_checkpoints(tmp_path, keep=1)
    opened = checkpoints, types.SimpleNamespace(state=state)
    monkeypatch.setattr(train, 'open_run', lambda *_, **how: opened)
    monkeypatch.setattr(train.hosts, 'playing', lambda *_, **how: contextlib.nullcontext())
    monkeypatch.setattr(train, 'play', lambda *_: (processes.EXIT_PREEMPTED, state))
    monkeypatch.setattr(train, 'checkpoint_metadata', lambda *_: {})
    monkeypatch.setattr(train.checkpoint, 'save', save)
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *args: signals.append(args)) for number in numbers]
    try:
        assert train.train(cfg, tmp_path) == processes.EXIT_PREEMPTED
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert saved == [3] and signals == []


def test_invalid_settings_have_the_exit_code_of_a_wrong_command_line():
    """Previously --config.algorithm=foo ended with 1, like a failed run."""
    for changes in ({'algorithm': 'foo'}, {'optim.lr': -1.0}):
        with pytest.raises(usage.WrongUsage, match=next(iter(changes))) as wrong:
            build.build(micro_runs.plain('frozen_lake', **changes))
    assert usage.code_of(wrong.value) == 2 and usage.code_of(ValueError('a file')) == 1


def test_a_missing_backend_is_a_one_line_error(monkeypatch, capsys):
    """Previously JAX_PLATFORMS=cuda without its plugin was an AssertionError of 30 lines."""
    monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
    for error in (AssertionError(), RuntimeError("no backend 'cuda'\n (you may need to ...)")):
        monkeypatch.setattr(jax, 'devices', mock.Mock(side_effect=error))
        with pytest.raises(SystemExit) as ended:
            command.check_backend()
        err = capsys.readouterr().err
        assert ended.value.code == 2 and len(err.splitlines()) == 1
        assert "JAX_PLATFORMS='cuda'" in err and 'pip install "jax[cuda13]"' in err


def test_a_missing_package_is_reported_with_the_extra_to_install(capsys):
    project = tomllib.loads((micro_runs.ROOT / 'pyproject.toml').read_text())['project']
    assert set(usage.EXTRAS.values()) <= project['optional-dependencies'].keys()
    for name, words, lines in (
        ('websockets.sync', "'.[hosts]'", 1),
        ('mine', "ModuleNotFoundError: No module named 'mine'", 2),
    ):
        error = ModuleNotFoundError(f'No module named {name!r}', name=name)
        command.report_interrupt(type(error), error, None)
        printed = capsys.readouterr().err
        assert words in printed and printed.count('\n') <= lines
    command.report_interrupt(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == '\ninterrupted\n'


@pytest.mark.parametrize('error, traced', [(ValueError('no'), False), (KeyError('no'), True)])
def test_only_unexpected_errors_end_with_a_traceback(error, traced, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(processes.os, '_exit', ended.append)
    processes.fail(error, 3)
    err = capsys.readouterr().err
    assert ended == [3] and 'error: ' in err and ('KeyError' in err.splitlines()[0]) == traced
