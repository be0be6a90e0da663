import io
import json
import os
import re
import shutil
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.machine import files, processes
from agentrl_jax.records.progress import Compiling, Progress
from agentrl_jax.records.run_log import (
    RunLog,
    plain_number,
    read_metrics,
    write_config,
)

CANARY = 'canary-8f2b1c'


def without_time(path):
    return [{k: v for k, v in row.items() if k != 'time_s'} for row in read_metrics(path)]


def test_numbers_have_their_shortest_form_and_round_trip_exactly():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    for value in bits[np.isfinite(bits)]:
        assert np.float32(plain_number(value)) == value
    assert repr(plain_number(jnp.float32(1e-6))) == '1e-06'
    assert jnp.bfloat16(plain_number(jnp.bfloat16(0.1))) == jnp.bfloat16(0.1)
    assert plain_number(np.bool_(True)) == 1
    for wrong in ('text', None, np.zeros(2)):
        with pytest.raises((TypeError, ValueError)):
            plain_number(wrong)


def test_values_that_are_not_finite_are_valid_json_and_round_trip(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(0, {'a/nan': np.float32('nan'), 'a/inf': -np.inf})
    line = (tmp_path / 'metrics.jsonl').read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f'{name} is not JSON'))
    row = read_metrics(tmp_path / 'metrics.jsonl')[0]
    assert np.isnan(row['a/nan']) and row['a/inf'] == -np.inf


def test_a_resumed_run_drops_later_rows_and_a_half_written_line(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    with RunLog(tmp_path) as log:
        for step in range(5):
            log.write(step, {'a/x': step})
    path.write_bytes(path.read_bytes() + b'{"step": 5, "time_s": 1')
    assert len(read_metrics(path)) == 5
    with RunLog(tmp_path, resume_step=3) as log:
        log.write(3, {'a/x': 30})
    assert without_time(path) == [
        {'step': s, 'a/x': x} for s, x in [(0, 0), (1, 1), (2, 2), (3, 30)]
    ]
    assert path.read_bytes().endswith(b'\n')


def test_a_broken_line_inside_is_an_error_that_names_it(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    for broken, reason in (
        ('{"step": 1', ''),
        ('[' * 5000, ''),
        ('{"a": 1}', 'step'),
        ('{"step": 1, "time_s": 1, "a/x": "high"}', "'a/x'"),
        ('{"step": 1, "time_s": 1, "a/x": 1' + '0' * 400 + '}', "'a/x'"),
        ('{"step": 1.5, "time_s": 1}', 'step 1.5'),
    ):
        path.write_text('{"step": 0, "time_s": 1}\n' + broken + '\n{"step": 2, "time_s": 1}\n')
        with pytest.raises(ValueError, match=f'metrics.jsonl, line 2: {reason}'):
            read_metrics(path)


def test_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    scalars = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *of: scalars.append(of), flush=lambda: None, close=lambda: None
    )
    module = types.SimpleNamespace(SummaryWriter=lambda *_, **__: writer)
    monkeypatch.setitem(sys.modules, 'tensorboardX', module)
    with RunLog(tmp_path, tensorboard=True) as log:
        log.write(7, {'eval/success': np.float32(0.25)})
    assert ('eval/success', 0.25, 7) in scalars


def test_the_config_dump_contains_no_secret_and_keeps_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv('SERVICE_TOKEN', 'canary-from-environment')
    config = {
        'rollout': {'max_tokens': 3072, 'tokenizer': 'x.model', 'sizes': (1, 2.5, None, True)},
        'env': {'password': CANARY, 'tokens': [CANARY], 'secret': {'inner': {'a': CANARY}}},
        'url': f'https://user:{CANARY}@host/path?api_key={CANARY}&page=2',
        'note': 'runs with canary-from-environment',
        'count': np.int64(3),
    }
    argv = [
        'train.py',
        '--config.rollout.max_tokens=3072',
        f'--config.wandb.api_key={CANARY} {CANARY}',
        '--hf-token',
        CANARY,
        '--workdir',
        'runs/a',
        f'https://:{CANARY}@host',
    ]
    write_config(tmp_path, config, argv)
    text = (tmp_path / 'config.json').read_text()
    assert 'canary' not in text
    document = json.loads(text)
    assert document['config']['rollout'] == {
        'max_tokens': 3072,
        'tokenizer': 'x.model',
        'sizes': [1, 2.5, None, True],
    }
    assert document['config']['url'] == 'https://***@host/path?api_key=***&page=2'
    assert document['config']['count'] == 3
    assert document['argv'][1] == '--config.rollout.max_tokens=3072'
    assert document['argv'][5:7] == ['--workdir', 'runs/a']


def test_wandb_continues_the_run_of_a_folder_and_never_gets_a_secret(tmp_path, monkeypatch):
    """The id was a path's hash: containers shared a run, and `rm -rf` did not start a new one."""
    calls = []
    run = types.SimpleNamespace(
        log=lambda row, step: calls.append(row | {'at': step}), finish=lambda: None
    )
    wandb = types.SimpleNamespace(init=lambda **kwargs: calls.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    config = {'lr': 0.1, 'api_key': CANARY}
    options = dict(wandb_project='p', config=config)
    for remove_folder in (False, True, False):
        with RunLog(tmp_path / 'run', **options) as log:
            log.write(len(calls), {'a/x': 2})
        assert (tmp_path / 'run' / 'wandb_id').read_text() == f'{calls[-2]["id"]}\n'
        if remove_folder:
            shutil.rmtree(tmp_path / 'run')
    first, second, third = calls[::2]
    assert first['id'] == second['id'] != third['id'] and first['resume'] == 'allow'
    assert re.fullmatch('[0-9a-f]{16}', first['id'])
    # W&B ignores rows of steps before its newest one, such as those repeated after a crash
    assert calls[1]['a/x'] == 2 and calls[1]['step'] == calls[1]['at'] == 1
    assert first['config'] == {'lr': 0.1, 'api_key': '***'} and config['api_key'] == CANARY
    assert first['settings'] == {'x_disable_meta': True}  # which would hold the command line
    with RunLog(tmp_path / 'other', process_index=1, tensorboard=True, **options) as log:
        log.write(0, {'a/x': 1})
    assert len(calls) == 6 and not (tmp_path / 'other').exists()  # process 0 alone


@pytest.mark.parametrize('package', ['tensorboardX', 'wandb'])
def test_a_missing_package_is_an_error_before_anything_is_written(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    options = {'tensorboardX': {'tensorboard': True}, 'wandb': {'wandb_project': 'p'}}[package]
    with pytest.raises(ModuleNotFoundError, match=package):
        RunLog(tmp_path / 'run', **options)
    assert not (tmp_path / 'run').exists()


def test_rows_that_are_missing_before_a_checkpoint_are_reported(tmp_path, capsys):
    path = tmp_path / 'metrics.jsonl'
    for steps, missing in ((range(4), ''), ((0, 1, 3), 'steps 2,'), ((1,), '0, 2 to 3,')):
        path.write_text(''.join(json.dumps({'step': n, 'time_s': 1.0}) + '\n' for n in steps))
        RunLog(tmp_path, resume_step=4).close()
        err = capsys.readouterr().err
        assert bool(missing) == bool(err) and missing in err


@pytest.mark.parametrize('contents', [b'{"a":\n1,}', b'\xff', b'[' * 100_000, b'1' * 5000, None])
def test_unreadable_files_are_named(tmp_path, contents):
    path = tmp_path / 'file.json'
    os.mkfifo(path) if contents is None else path.write_bytes(contents)
    with pytest.raises(ValueError, match='file.json'):
        files.read_json(path)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_draws_a_bar_and_continues_a_resumed_run(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.delenv('NO_COLOR', raising=False)
    stream = Terminal()
    with Progress(10, 'train [x]', done=4, stream=stream) as progress:
        progress.advance(2, note='[red]raw')
        progress.say('saved')
    text = stream.getvalue()
    assert '6/10' in text and 'train [x]' in text and '[red]raw' in text and 'saved' in text


def compile_events(name, seconds):
    """Emit the events of a compilation that takes `seconds`."""
    jax.monitoring.record_scalar(processes.COMPILE_EVENT, 0.0, fun_name=f'jit({name})')
    time.sleep(seconds)
    jax.monitoring.record_event_duration_secs(processes.COMPILE_EVENT, seconds, fun_name=name)


def test_long_compilations_are_reported_while_they_run(tmp_path):
    """Previously step 0 printed nothing for minutes."""
    messages = []
    with Compiling(messages.append, workdir=tmp_path, long_s=0.1) as compiling:
        compile_events('add', 0.0)
        assert messages == [] and compiling.now() is None
        jax.monitoring.record_scalar(processes.COMPILE_EVENT, 0.0, fun_name='jit(learn)')
        deadline = time.monotonic() + 10
        while not messages and time.monotonic() < deadline:
            time.sleep(0.01)
        assert messages == ['compiling the update'] and compiling.now() == {'the update': '0 s'}
        jax.monitoring.record_event_duration_secs(processes.COMPILE_EVENT, 65.4, fun_name='x')
        assert messages[1:] == ['compiled the update: 65 s'] and compiling.now() is None
    compile_events('learn', 0.0)
    assert len(messages) == 2
    with Compiling(messages.append, workdir=tmp_path, long_s=0.1):  # of a resumed run
        compile_events('learn', 0.5)
    assert messages[2:] == ['compiling the update (65 s last time)', 'compiled the update: 0 s']
    (tmp_path / 'compiled.json').write_text('[')
    assert Compiling(messages.append, workdir=tmp_path).now() is None


def test_a_program_is_named_after_its_function():
    names = {}

    class Counter(processes.CompileCounter):
        def begun(self, name):
            names[name] = 0.0

        def done(self, name, seconds):
            names[name] += seconds

    with Counter():

        def no_other_function(x):
            return jnp.cos(x) * 3.25

        jax.jit(no_other_function)(np.ones(5, np.float32))
    assert names['no_other_function'] > 0
