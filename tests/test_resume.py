"""A run that is killed and started again ends with the same bits as one that is left alone."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax.machine import checkpoint, processes
from agentrl_jax.records import run_log

pytestmark = pytest.mark.soak

KILLED = -signal.SIGKILL


class Runs:
    """Runs of one config in subprocesses."""

    def __init__(self, folder):
        self.folder, self.cfg = folder, micro_runs.get_config()
        self.undisturbed = folder / 'undisturbed'
        process = self.start(self.undisturbed)
        assert self.finish(process) == 0, self.said(self.undisturbed)

    def start(self, workdir, *more):
        with (self.folder / f'{workdir.name}.log').open('ab') as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    '-m',
                    'agentrl_jax.train',
                    '--config=tests/micro_runs.py',
                    f'--workdir={workdir}',
                    *more,
                ],
                cwd=micro_runs.ROOT,
                env=micro_runs.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, process):
        try:
            return process.wait(timeout=240)
        finally:
            process.kill()

    def said(self, workdir):
        return (self.folder / f'{workdir.name}.log').read_text()

    def rows(self, workdir):
        return run_log.read_metrics(workdir / run_log.METRICS_FILE)

    def stop_after(self, workdir, row, delay, number):
        """Starts the run, waits for a row of metrics (-1: for nothing) and sends the signal."""
        process = self.start(workdir)
        deadline = time.monotonic() + 240
        while row >= 0 and process.poll() is None and time.monotonic() < deadline:
            if self.rows(workdir)[-1:] and self.rows(workdir)[-1]['step'] >= row:
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(number)
        return self.finish(process)

    def assert_same_as_undisturbed(self, workdir, *more):
        assert self.finish(self.start(workdir, *more)) == 0, self.said(workdir)
        rows, expected = self.rows(workdir), self.rows(self.undisturbed)
        assert micro_runs.without_times(rows) == micro_runs.without_times(expected)
        one, other = (micro_runs.saved_state(self.cfg, w) for w in (workdir, self.undisturbed))
        jax.tree.map(np.testing.assert_array_equal, one, other)
        assert int(one.step) == self.cfg.steps
        for page in (self.undisturbed / 'rollouts').glob('*.json'):
            assert page.read_bytes() == (workdir / 'rollouts' / page.name).read_bytes()


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp('runs'))


def test_the_undisturbed_run_trained(runs):
    rows = runs.rows(runs.undisturbed)
    assert [row['step'] for row in rows] == list(range(21))
    assert all(row['perf/recompiles'] == 0 for row in rows)
    assert checkpoint.steps(runs.undisturbed / 'checkpoints') == [16, 20]
    assert run_log.finished_step(runs.undisturbed) == 20
    state = micro_runs.saved_state(runs.cfg, runs.undisturbed)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert all(np.isfinite(x).all() for x in moments) and any(x.any() for x in moments)


def test_kill_9_at_three_random_moments_changes_nothing(runs):
    """One while the program starts, two a few steps later; tests/chaos.py kills more often."""
    rng, workdir, kills, killed = random.Random(1), runs.folder / 'killed', 3, 0
    for number in range(kills):
        rows = runs.rows(workdir)
        reached = rows[-1]['step'] if rows else -1
        row = -1 if number % 4 == 1 else reached + rng.randint(0, 4)
        delay = rng.uniform(2, 6) if row == -1 else rng.uniform(0, 0.3)
        killed += runs.stop_after(workdir, row, delay, signal.SIGKILL) == KILLED
    assert killed >= kills - 1  # the last one may come too late
    runs.assert_same_as_undisturbed(workdir)


def test_a_signal_saves_the_step_and_says_so_by_its_exit_code(runs):
    """Rows behind the checkpoint, the last one cut (what kill -9 may leave), are forgotten.

    How a run ends at SIGTERM: test_distributed_training.py.
    """
    workdir = runs.folder / 'asked'
    assert runs.stop_after(workdir, 3, 0.0, signal.SIGINT) == processes.EXIT_PREEMPTED
    (step,) = checkpoint.steps(workdir / 'checkpoints')[-1:]
    rows = runs.rows(workdir)
    assert 3 < step < 20 and rows[-1]['step'] == step - 1
    assert runs.said(workdir).count('asked to stop') == 1
    assert f'stopped; step {step} is saved, and the same command resumes: ' in runs.said(workdir)
    assert (workdir / 'curves.png').exists() and not (workdir / 'now.json').exists()
    assert run_log.finished_step(workdir) is None
    ahead = json.dumps({**rows[-1], 'step': step}) + '\n'
    with (workdir / run_log.METRICS_FILE).open('a') as file:
        file.write(ahead + ahead[: len(ahead) // 2])
    runs.assert_same_as_undisturbed(workdir)


def test_a_damaged_checkpoint_ends_a_run_and_an_older_one_leads_to_the_same_end(runs):
    """An empty file, as a power loss leaves it."""
    workdir = shutil.copytree(runs.undisturbed, runs.folder / 'damaged')
    (workdir / run_log.FINISHED_FILE).unlink()
    (workdir / 'checkpoints' / '20' / checkpoint.MARK).write_text('')
    assert runs.finish(runs.start(workdir)) == processes.EXIT_DAMAGED
    (line,) = [line for line in runs.said(workdir).splitlines() if 'damaged' in line]
    assert line.startswith('error: checkpoint 20 is damaged: ') and checkpoint.MARK in line
    assert line.endswith('--fallback goes back to step 16')
    runs.assert_same_as_undisturbed(workdir, '--fallback')
    assert 'WARNING: checkpoint 20 is damaged' in runs.said(workdir)
    assert 'falling back to step 16' in runs.said(workdir)
    assert checkpoint.steps(workdir / 'checkpoints') == [16, 20]
