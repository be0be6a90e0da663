"""Killing any process of a sweep loses no run and trains none twice at the same time."""

import contextlib
import dataclasses
import io
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import fake_sweep
import pytest
from waiting import until

from agentrl_jax.machine import processes
from agentrl_jax.records import run_log
from agentrl_jax.sweeps import local
from agentrl_jax.sweeps import status as sweep_status
from agentrl_jax.sweeps.board import Board

DRIVER = pathlib.Path(fake_sweep.__file__)
ENVIRONMENT = os.environ | {'PYTHONPATH': str(DRIVER.parent.parent), 'JAX_PLATFORMS': 'cpu'}


def start(workdir, *, runs=1, jobs=1, retries=2, steps=5, step_s=0.02, fault=()):
    """Start a sweep in a separate process."""
    words = [sys.executable, DRIVER, workdir, runs, jobs, retries, steps, step_s, *fault]
    with (workdir / f'sweep_{time.monotonic_ns()}.txt').open('wb') as log:
        return subprocess.Popen(
            list(map(str, words)), env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
        )


def run_here(workdir, *, runs=1, jobs=1, retries=2, steps=5, step_s=0.01, fault=()):
    """Run a sweep here; return (exit code, output, maximum number of concurrent runs)."""
    plan = fake_sweep.plan(workdir, runs, jobs, retries, steps, step_s, *map(str, fault))
    output, peak = io.StringIO(), 0

    class Watcher(Board):
        def show(self, statuses):
            nonlocal peak
            peak = max(peak, sum(status.state == 'running' for status in statuses))
            super().show(statuses)

    with Watcher(output) as board:
        code = local.train_all(plan, board, poll_s=0.01, refresh_s=0.05)
    return code, output.getvalue(), peak


def steps_of(folder):
    return [row['step'] for row in sweep_status.tail(folder / run_log.METRICS_FILE)]


def starts_of(folder):
    """Return (process, first step) of every start, logged by the training."""
    path = folder / 'starts.txt'
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]


def outcomes(folder):
    return [attempt['outcome'] for attempt in sweep_status.read_attempts(folder)]


def assert_all_done(workdir, runs, steps):
    """Check that every run finished, never ran twice at once, and lost no step at restarts."""
    assert not list(workdir.glob('*/DOUBLED'))
    for number in range(runs):
        folder = workdir / f'run-{number}'
        assert run_log.finished_step(folder) == steps
        assert set(steps_of(folder)) == set(range(steps))
        until(
            lambda folder=folder: not sweep_status.is_locked(folder), 240
        )  # an orphan may be ending


# ---- undisturbed sweeps ------------------------------------------------------------------------


def test_a_sweep_trains_all_its_runs_and_does_nothing_the_second_time(tmp_path, monkeypatch):
    """Previously durations were differences of wall-clock times: negative, or hours too long."""
    clock, began = time.time, time.monotonic()
    jumps = iter([0.0, -86400.0, 86400.0])
    monkeypatch.setattr(sweep_status.time, 'time', lambda: clock() + next(jumps, -3600.0))
    code, _, peak = run_here(tmp_path, runs=3, jobs=2, step_s=0.03)
    assert code == 0 and peak == 2
    assert_all_done(tmp_path, 3, 5)
    folders = [tmp_path / f'run-{i}' for i in range(3)]
    attempts = [attempt for x in folders for attempt in sweep_status.read_attempts(x)]
    assert [attempt['outcome'] for attempt in attempts] == ['done'] * 3
    assert 0 < sum(attempt['seconds'] for attempt in attempts) < 2 * (time.monotonic() - began)
    before = starts_of(folders[0])
    assert run_here(tmp_path, runs=3, jobs=2)[0] == 0 and starts_of(folders[0]) == before


@pytest.mark.parametrize(
    'fault, retries, code, ends, firsts, words',
    [
        ('once', 2, 0, ['failed', 'done'], [0, 3], 'failed at attempt 1 (exit code 3), 2 more att'),
        ('quiet', 0, 1, ['failed'], [0], 'it ended without finishing'),
        ('busy', 0, 0, ['preempted', 'done'], [0, 3], '1 runs: 1 done'),  # 75 is not a failure
    ],
)
def test_a_run_that_ends_early_resumes_from_its_checkpoint_while_retries_remain(
    fault, retries, code, ends, firsts, words, tmp_path
):
    exit_code, output, _ = run_here(tmp_path, retries=retries, fault=(fault, 3))
    assert exit_code == code and outcomes(tmp_path / 'run-0') == ends and words in output
    assert [first for _, first in starts_of(tmp_path / 'run-0')] == firsts
    assert ('this went wrong' in output) == ('failed' in ends)


def test_a_run_that_always_fails_is_abandoned_and_the_rest_are_trained(tmp_path):
    """2 retries are 3 attempts; the same command makes 3 more attempts."""
    fake_sweep.plan(tmp_path, 1, 1, 2, 3, 0.01)
    (tmp_path / 'run-0' / 'saved').write_text('2')  # run-0 still has to train step 2
    (tmp_path / 'run-1').mkdir()
    (tmp_path / 'run-1' / 'saved').write_text('3')  # run-1 is past it
    for attempts in (3, 6):
        code, output, _ = run_here(tmp_path, runs=2, retries=2, steps=4, fault=('always', 2))
        assert code == 1 and 'given up' in output
        assert outcomes(tmp_path / 'run-0') == ['failed'] * attempts
        assert f'failed ({attempts} attempts)' in output
    assert outcomes(tmp_path / 'run-1') == ['done']


def environments(tmp_path, names, slots=({},)):
    """Return the values of environment variables in runs, one run per slot."""
    report = f'import os; print(*(os.environ[name] for name in {names}))'
    plan = fake_sweep.plan(tmp_path, len(slots), len(slots), 0, 1, 0)
    words = [sys.executable, '-S', '-E', '-c', report]
    plan = dataclasses.replace(plan, command=lambda _: words, slots=list(slots))
    assert local.train_all(plan, Board(io.StringIO()), poll_s=0.01, refresh_s=0.05) == 1
    logs = [tmp_path / run.name / 'output.txt' for run in plan.runs]
    return [log.read_text().splitlines()[-1] for log in logs]


def test_a_run_is_one_process_with_the_gpus_of_its_slot_and_a_shared_program_cache(
    tmp_path, monkeypatch
):
    """Each process of srun -n8 may be a sweep. Previously every run recompiled all programs."""
    cache = ['JAX_COMPILATION_CACHE_DIR', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS']
    for name in (*processes.JOIN, *cache):
        monkeypatch.delenv(name, raising=False)
    slots = [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '2,3'}]
    values = environments(tmp_path, ['CUDA_VISIBLE_DEVICES', 'JAX_NUM_PROCESSES', *cache], slots)
    assert sorted(values) == [f'{gpus} 1 {tmp_path}/programs 0' for gpus in ('0,1', '2,3')]
    monkeypatch.setenv(cache[0], 'mine')
    assert environments(tmp_path, cache) == ['mine 0']


# ---- killed processes --------------------------------------------------------------------------


def test_an_orphan_is_not_started_twice_and_keeps_its_slot(tmp_path):
    """After kill -9 of a sweep its child survives, and a second sweep waits for the child.

    With one job, nothing else is started while an orphan still uses the machine's memory.
    """
    folder = tmp_path / 'run-0'
    first = start(tmp_path, runs=2, steps=100)
    until(lambda: len(steps_of(folder)) > 2)
    first.kill()
    first.wait()
    assert sweep_status.is_locked(folder) and outcomes(folder) == [None]
    code, output, _ = run_here(tmp_path, runs=2, steps=100, step_s=0)
    assert code == 0 and 'run-0  running' in output
    assert len(starts_of(folder)) == 1 and outcomes(folder) == [None]  # one start, done
    assert_all_done(tmp_path, 2, 100)
    (attempt,) = sweep_status.read_attempts(tmp_path / 'run-1')
    assert attempt['started'] > (folder / 'finished.json').stat().st_mtime


@pytest.mark.soak
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_same_command_resumes(tmp_path, number):
    sweep = start(tmp_path, runs=3, jobs=2, steps=60)
    until(lambda: all(len(steps_of(tmp_path / f'run-{i}')) > 2 for i in range(2)))
    sweep.send_signal(number)
    assert sweep.wait(240) == 75
    for folder in (tmp_path / 'run-0', tmp_path / 'run-1'):
        assert outcomes(folder) == ['preempted'] and not sweep_status.is_locked(folder)
    assert not starts_of(tmp_path / 'run-2')
    assert run_here(tmp_path, runs=3, jobs=2, steps=60)[0] == 0
    assert all(starts_of(tmp_path / f'run-{i}')[1][1] > 2 for i in range(2))
    assert_all_done(tmp_path, 3, 60)


@pytest.mark.soak
def test_kill_9_at_random_moments_loses_no_run_and_trains_none_twice(tmp_path):
    """Sweeps and trainings are killed in random order, often with two sweeps running."""
    rng, runs, steps, killed = random.Random(0), 5, 80, 0
    for number in range(5):
        logs = set(tmp_path.glob('sweep_*.txt'))
        sweeps = [start(tmp_path, runs=runs, jobs=2, steps=steps) for _ in range(rng.randint(1, 2))]
        if number != 2:  # kill one sweep during its start, the rest during training
            until(lambda logs=logs: has_printed(tmp_path, logs))
        time.sleep(rng.uniform(0, 0.5))
        for _ in range(rng.randint(0, 2)):
            kill_one_training(tmp_path, rng)
        for sweep in sweeps:
            time.sleep(rng.uniform(0, 0.1))
            sweep.kill()
            killed += sweep.wait() == -signal.SIGKILL
    assert killed >= 4
    assert run_here(tmp_path, runs=runs, jobs=2, steps=steps)[0] == 0
    assert_all_done(tmp_path, runs, steps)


def has_printed(workdir, before):
    """Return whether a new sweep has printed anything."""
    return any(path.stat().st_size for path in set(workdir.glob('sweep_*.txt')) - before)


def kill_one_training(workdir, rng):
    """Kill (-9) a training that holds the lock of its run."""
    folders = [path for path in sorted(workdir.glob('run-*')) if sweep_status.is_locked(path)]
    started = [starts_of(folder)[-1][0] for folder in folders if starts_of(folder)]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
        number = rng.choice(started)
        # The number may be from an earlier start, and now belong to an unrelated process.
        if b'fake_training.py' in pathlib.Path(f'/proc/{number}/cmdline').read_bytes():
            os.kill(number, signal.SIGKILL)
