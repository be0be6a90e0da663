"""A run that is killed, stopped and damaged ends with the same bits as an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import time

import chaos
import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.machine import checkpoint, processes
from agentrl_jax.records import run_log
from agentrl_jax.run import recorder
from agentrl_jax.run.config import read as read_config

pytestmark = pytest.mark.soak


class Workdir:
    """A run of micro_runs.get_config() in separate processes."""

    def __init__(self, path):
        self.path, self.log = path, path.with_suffix('.log')

    def start(self, *more):
        command = [sys.executable, '-m', 'agentrl_jax.train', '--config=tests/micro_runs.py']
        with self.log.open('ab') as log:
            return subprocess.Popen(
                [*command, f'--workdir={self.path}', *more],
                cwd=micro_runs.ROOT,
                env=micro_runs.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, process):
        """Wait for the process and return its exit code."""
        try:
            return process.wait(timeout=240)
        finally:
            process.kill()

    def stop_after(self, row, delay, number):
        """Start the run, wait for a row of metrics and send the signal."""
        process, deadline = self.start(), time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if any(metrics['step'] >= row for metrics in self.rows()):
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(number)
        return self.finish(process)

    def output(self):
        return self.log.read_text()

    def rows(self):
        return run_log.read_metrics(self.path / run_log.METRICS_FILE)

    def steps(self):
        return checkpoint.steps(self.path / 'checkpoints')


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    run = Workdir(tmp_path_factory.mktemp('runs') / 'undisturbed')
    assert run.finish(run.start()) == 0, run.output()
    return run


def test_the_undisturbed_run_trained(undisturbed):
    rows = undisturbed.rows()
    assert [row['step'] for row in rows] == list(range(21))
    assert all(row['perf/recompiles'] == 0 for row in rows)
    assert undisturbed.steps() == [16, 20] and run_log.finished_step(undisturbed.path) == 20


def test_starting_a_finished_run_again_reports_that_it_is_finished(undisturbed):
    """The second start silently validated the last step again."""
    before = undisturbed.output(), undisturbed.rows()
    assert undisturbed.finish(undisturbed.start()) == 0
    output = undisturbed.output().removeprefix(before[0])
    assert f'{undisturbed.path} is finished: step 20, held-out success ' in output
    assert 'to train longer: ' in output and ' --config.steps=40\n' in output
    assert 'compiling' not in output and undisturbed.rows() == before[1]


def test_fewer_steps_than_trained_are_rejected(undisturbed):
    before = undisturbed.output()
    assert undisturbed.finish(undisturbed.start('--config.steps=5')) == 2
    assert 'is at step 20 already, and steps=5' in undisturbed.output().removeprefix(before)
    assert run_log.finished_step(undisturbed.path) == 20


def test_a_killed_stopped_and_damaged_run_ends_like_the_undisturbed_one(undisturbed, tmp_path):
    """Disturbances: kill -9, Ctrl-C, half a row after the last one, an empty checkpoint file.

    tests/chaos.py kills at random times; test_distributed_training.py tests SIGTERM.
    """
    run = Workdir(tmp_path / 'disturbed')
    assert run.stop_after(1, 0.1, signal.SIGKILL) == -signal.SIGKILL

    assert run.stop_after(7, 0.0, signal.SIGINT) == processes.EXIT_PREEMPTED
    (older, step), rows = run.steps(), run.rows()
    assert 7 < step < 20 and rows[-1]['step'] == step - 1
    assert run.output().count('asked to stop') == 1
    assert f'stopped; step {step} is saved. Run the same command to resume: ' in run.output()
    assert not (run.path / 'now.json').exists()
    assert run_log.finished_step(run.path) is None
    ahead = json.dumps({**rows[-1], 'step': step}) + '\n'
    with (run.path / run_log.METRICS_FILE).open('a') as file:
        file.write(ahead + ahead[: len(ahead) // 2])

    (run.path / 'checkpoints' / str(step) / checkpoint.MARK).write_text('')
    assert run.finish(run.start()) == processes.EXIT_DAMAGED
    (line,) = [line for line in run.output().splitlines() if 'damaged' in line]
    assert line.startswith(f'error: checkpoint {step} is damaged: ') and checkpoint.MARK in line
    assert line.endswith(f'--fallback loads step {older} instead')
    assert run.finish(run.start('--fallback')) == 0, run.output()
    assert f'warning: checkpoint {step} is damaged' in run.output()
    assert f'falling back to step {older}' in run.output()

    assert run.steps() == [16, 20]
    rows, expected = (micro_runs.without_times(each.rows()) for each in (run, undisturbed))
    assert rows == expected
    cfg = micro_runs.get_config()
    one, other = (micro_runs.saved_state(cfg, each.path) for each in (run, undisturbed))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    pages = {page.name for page in (undisturbed.path / 'rollouts').glob('*.json')}
    disturbed_pages = {page.name for page in (run.path / 'rollouts').glob('*.json')}
    assert pages - disturbed_pages <= {f'step_{step - 1:06d}.json'}  # a stopped step writes no page
    for name in disturbed_pages:
        page = undisturbed.path / 'rollouts' / name
        assert page.read_bytes() == (run.path / 'rollouts' / name).read_bytes()


@pytest.fixture(scope='module')
def unstopped(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('runs') / 'left_alone'
    with micro_runs.one_device():
        assert train.train(short_config(), str(workdir)) == 0
    return workdir


def short_config():
    """Three steps with a page after each; no checkpoint between the first and the last."""
    changes = {'checkpoint.every': 9, 'checkpoint.keep': 9, 'log.rollouts_every': 1}
    return micro_runs.plain('frozen_lake', **changes)


@pytest.mark.parametrize(
    'place, name, step, saved, pages',
    [
        (train, 'validate', 2, 2, 2),  # in the validation before step 2
        (train.collecting, 'collect', 1, 1, 1),  # in the rollout: no update follows
        (recorder.Recorder, 'page', 1, 2, 2),
        (recorder.Recorder, 'write', 1, 2, 1),  # after the update: no page follows
    ],
)
def test_a_stop_saves_before_anything_else_is_computed(
    place, name, step, saved, pages, unstopped, tmp_path, monkeypatch
):
    """The stop first finished the step and compiled two programs for a page, which took 70 s."""
    now, real = [], getattr(place, name)

    def stopping(*args, **more):
        if now[-1] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **more)

    def begin(record, step):
        now.append(step)
        return real_begin(record, step)

    real_begin = recorder.Recorder.begin
    with micro_runs.one_device():
        with monkeypatch.context() as patch:
            patch.setattr(recorder.Recorder, 'begin', begin)
            patch.setattr(place, name, stopping)
            assert train.train(short_config(), str(tmp_path)) == processes.EXIT_PREEMPTED
        assert checkpoint.steps(tmp_path / 'checkpoints') == [0, saved]
        assert len(list((tmp_path / 'rollouts').glob('*.json'))) == pages
        assert train.train(short_config(), str(tmp_path)) == 0
    one, other = (micro_runs.saved_state(short_config(), each) for each in (unstopped, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, one, other)


# ---- tests/chaos.py, which kills runs of every kind any number of times --------------------------


def test_kill_9_of_a_run_on_hosts_changes_no_bit_and_leaves_no_server(tmp_path):
    runs = chaos.Chaos(tmp_path, seed=13)
    try:
        runs.of('hosts', kills=2)
    finally:
        runs.end()
    assert runs.tally.total() and runs.leaves > 10
    assert runs.compared['pages_of'] and runs.compared['replies_of']


@pytest.mark.parametrize('name', chaos.KINDS)
def test_every_kind_of_killed_run_has_a_valid_config(name):
    read_config(chaos.config_of(chaos.KINDS[name].changes))
