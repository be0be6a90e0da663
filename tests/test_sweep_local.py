"""Processes of a sweep: no run is lost, none trains twice at once, whatever is killed."""

import contextlib
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import fake_sweep
import micro_runs
import pytest

from agentrl_jax.machine import checkpoint
from agentrl_jax.records import run_log
from agentrl_jax.sweeps import local
from agentrl_jax.sweeps import status as sweep_status
from agentrl_jax.sweeps.board import Board

DRIVER = pathlib.Path(fake_sweep.__file__)
ENVIRONMENT = os.environ | {'PYTHONPATH': str(DRIVER.parent.parent), 'JAX_PLATFORMS': 'cpu'}


def start(workdir, *, runs=1, jobs=1, retries=2, steps=5, step_s=0.02, fault=()):
    """A sweep in a process of its own."""
    words = [sys.executable, DRIVER, workdir, runs, jobs, retries, steps, step_s, *fault]
    with (workdir / f'sweep_{time.monotonic_ns()}.txt').open('wb') as said:
        return subprocess.Popen(
            list(map(str, words)), env=ENVIRONMENT, stdout=said, stderr=subprocess.STDOUT
        )


def run_here(workdir, *, runs=1, jobs=1, retries=2, steps=5, step_s=0.01, fault=()):
    """(exit code, what was said) of a sweep in this process."""
    plan = fake_sweep.plan(workdir, runs, jobs, retries, steps, step_s, *map(str, fault))
    said = io.StringIO()
    with Board(said) as board:
        code = local.train_all(plan, board, poll_s=0.01, refresh_s=0.05)
    return code, said.getvalue()


def until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, 'nothing happened'
        time.sleep(0.01)


def steps_of(folder):
    return [row['step'] for row in sweep_status.tail(folder / run_log.METRICS_FILE)]


def starts_of(folder):
    """(process, first step) of every start, as the training itself noted them."""
    path = folder / 'starts.txt'
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]


def outcomes(folder):
    return [attempt['outcome'] for attempt in sweep_status.read_attempts(folder)]


def assert_all_done(workdir, runs, steps):
    """Every run is finished, was never doubled, and lost no step between its starts."""
    assert not list(workdir.glob('*/DOUBLED'))
    for number in range(runs):
        folder = workdir / f'run-{number}'
        assert run_log.finished_step(folder) == steps
        assert set(steps_of(folder)) == set(range(steps))
        until(lambda folder=folder: not sweep_status.is_locked(folder))  # an orphan's last moment


# ---- one sweep left alone ----------------------------------------------------------------------


def test_a_sweep_trains_all_its_runs_and_does_nothing_the_second_time(tmp_path):
    code, said = run_here(tmp_path, runs=3, jobs=2)
    assert code == 0 and '3 runs: 3 done' in said
    assert_all_done(tmp_path, 3, 5)
    assert all(outcomes(tmp_path / f'run-{i}') == ['done'] for i in range(3))
    before = starts_of(tmp_path / 'run-0')
    code, said = run_here(tmp_path, runs=3, jobs=2)
    assert code == 0 and starts_of(tmp_path / 'run-0') == before


def test_no_more_runs_at_once_than_jobs(tmp_path):
    plan = fake_sweep.plan(tmp_path, 4, 2, 0, 3, 0.02)
    most = []

    class Watcher:
        def show(self, statuses):
            most.append(sum(status.state == 'running' for status in statuses))

    assert local.train_all(plan, Watcher(), poll_s=0.01, refresh_s=0.01) == 0
    assert max(most) == 2


def test_a_failed_run_goes_on_from_its_checkpoint(tmp_path):
    code, said = run_here(tmp_path, steps=6, fault=('once', 4))
    assert code == 0 and outcomes(tmp_path / 'run-0') == ['failed', 'done']
    assert [first for _, first in starts_of(tmp_path / 'run-0')] == [0, 4]
    assert 'failed at attempt 1 (exit code 3), 2 more attempts' in said
    assert 'this went wrong' in said
    assert_all_done(tmp_path, 1, 6)


def test_a_run_that_always_fails_is_given_up_and_the_others_are_trained(tmp_path):
    """2 retries are 3 attempts; the same command tries as often again."""
    fake_sweep.plan(tmp_path, 1, 1, 2, 3, 0.01)
    (tmp_path / 'run-0' / 'saved').write_text('2')  # only run-0 comes by step 2 ...
    (tmp_path / 'run-1').mkdir()
    (tmp_path / 'run-1' / 'saved').write_text('3')  # ... and run-1 is behind it
    for tried in (3, 6):
        code, said = run_here(tmp_path, runs=2, retries=2, steps=4, fault=('always', 2))
        assert code == 1 and 'given up' in said
        assert outcomes(tmp_path / 'run-0') == ['failed'] * tried
        assert f'failed ({tried} attempts)' in said
    assert outcomes(tmp_path / 'run-1') == ['done']


def test_an_end_without_the_finished_marker_is_a_failure(tmp_path):
    code, said = run_here(tmp_path, retries=0, fault=('quiet', 3))
    assert code == 1 and 'it ended without finishing' in said
    assert outcomes(tmp_path / 'run-0') == ['failed']


def test_exit_code_75_is_tried_again_without_being_counted(tmp_path):
    code, _ = run_here(tmp_path, retries=0, fault=('busy', 3))
    assert code == 0 and outcomes(tmp_path / 'run-0') == ['preempted', 'done']
    assert [first for _, first in starts_of(tmp_path / 'run-0')] == [0, 3]


def test_each_slot_has_its_own_environment(tmp_path):
    plan = fake_sweep.plan(tmp_path, 2, 2, 0, 1, 0)

    def command(run):
        report = 'import os; print(os.environ["CUDA_VISIBLE_DEVICES"])'
        return [sys.executable, '-S', '-E', '-c', report]

    slots = [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '2,3'}]
    plan = local.Plan(plan.runs, tmp_path, command, slots, retries=0)
    assert local.train_all(plan, Board(io.StringIO()), poll_s=0.01, refresh_s=0.05) == 1
    logs = [(tmp_path / f'run-{i}' / 'output.txt').read_text().splitlines()[-1] for i in range(2)]
    assert sorted(logs) == ['0,1', '2,3']


# ---- locks -------------------------------------------------------------------------------------


def test_a_claim_excludes_others_until_it_is_closed(tmp_path):
    lock = sweep_status.claim(tmp_path)
    assert lock is not None and sweep_status.claim(tmp_path) is None
    assert sweep_status.is_locked(tmp_path)
    os.close(lock)
    assert not sweep_status.is_locked(tmp_path)


def test_the_lock_is_the_child_s_own(tmp_path):
    """The parent's descriptor is closed and the child still holds the lock, until kill -9."""
    lock = sweep_status.claim(tmp_path)
    child = subprocess.Popen(
        [sys.executable, '-S', '-c', 'input()'], stdin=subprocess.PIPE, pass_fds=(lock,)
    )
    os.close(lock)
    assert sweep_status.claim(tmp_path) is None
    child.kill()
    child.communicate()
    assert not sweep_status.is_locked(tmp_path)


# ---- what is killed ----------------------------------------------------------------------------


def test_an_orphan_is_not_doubled_and_its_end_is_seen(tmp_path):
    """kill -9 of the sweep while its child lives on: a second sweep waits for the child."""
    folder = tmp_path / 'run-0'
    first = start(tmp_path, steps=150)
    until(lambda: len(steps_of(folder)) > 2)
    first.kill()
    first.wait()
    assert sweep_status.is_locked(folder) and outcomes(folder) == [None]
    code, said = run_here(tmp_path, steps=150)
    assert code == 0 and 'run-0  running' in said
    assert len(starts_of(folder)) == 1 and outcomes(folder) == [None]  # one start, done
    assert_all_done(tmp_path, 1, 150)


@pytest.mark.soak
def test_an_orphan_keeps_its_slot(tmp_path):
    """With one job, nothing else is started while an orphan still has the machine's memory."""
    first = start(tmp_path, runs=2, steps=100)
    until(lambda: len(steps_of(tmp_path / 'run-0')) > 2)
    first.kill()
    first.wait()
    assert run_here(tmp_path, runs=2, steps=100, step_s=0)[0] == 0
    assert_all_done(tmp_path, 2, 100)
    assert len(starts_of(tmp_path / 'run-0')) == 1
    (attempt,) = sweep_status.read_attempts(tmp_path / 'run-1')
    assert attempt['started'] > (tmp_path / 'run-0' / 'finished.json').stat().st_mtime


@pytest.mark.soak
def test_a_killed_child_is_retried_from_its_checkpoint(tmp_path):
    folder = tmp_path / 'run-0'
    sweep = start(tmp_path, steps=60)
    until(lambda: len(steps_of(folder)) > 2)
    os.kill(starts_of(folder)[0][0], signal.SIGKILL)
    assert sweep.wait(240) == 0
    assert outcomes(folder) == ['failed', 'done'] and starts_of(folder)[1][1] > 1
    assert_all_done(tmp_path, 1, 60)


def test_attempts_last_as_long_as_they_do_whatever_the_clock_is_set_to(tmp_path, monkeypatch):
    """They were differences of times of day: negative, or hours too long."""
    jumps, tell = iter([0.0, -86400.0, 86400.0]), time.time
    monkeypatch.setattr(sweep_status.time, 'time', lambda: tell() + next(jumps, -3600.0))
    began = time.monotonic()
    assert run_here(tmp_path, runs=3)[0] == 0
    spent = [sweep_status.read_attempts(tmp_path / f'run-{i}')[0]['seconds'] for i in range(3)]
    assert min(spent) > 0 and sum(spent) < time.monotonic() - began


@pytest.mark.soak
def test_an_orphan_that_is_killed_is_taken_over(tmp_path):
    folder = tmp_path / 'run-0'
    first = start(tmp_path, steps=100)
    until(lambda: len(steps_of(folder)) > 2)
    first.kill()
    first.wait()
    second = start(tmp_path, steps=100)
    until(lambda: 'running' in ''.join(p.read_text() for p in tmp_path.glob('sweep_*.txt')))
    os.kill(starts_of(folder)[0][0], signal.SIGKILL)
    assert second.wait(240) == 0
    assert len(starts_of(folder)) == 2 and outcomes(folder) == [None, 'done']
    assert_all_done(tmp_path, 1, 100)


@pytest.mark.soak
def test_two_sweeps_at_once_share_the_work(tmp_path):
    sweeps = [start(tmp_path, runs=6, jobs=1, steps=20) for _ in range(2)]
    assert [sweep.wait(240) for sweep in sweeps] == [0, 0]
    assert_all_done(tmp_path, 6, 20)
    assert [len(starts_of(tmp_path / f'run-{i}')) for i in range(6)] == [1] * 6
    began = [sweep_status.read_attempts(tmp_path / f'run-{i}')[0] for i in range(6)]
    spans = sorted((attempt['started'], attempt['seconds']) for attempt in began)
    # One job each, and yet some run began before the one before it had ended.
    assert any(a + length > b for (a, length), (b, _) in zip(spans, spans[1:], strict=False))


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
def test_kill_9_at_random_moments_loses_and_doubles_nothing(tmp_path):
    """Sweeps and trainings are killed in random order, often with two sweeps at work."""
    rng, runs, steps, killed = random.Random(0), 5, 80, 0
    for number in range(5):
        said = set(tmp_path.glob('sweep_*.txt'))
        sweeps = [start(tmp_path, runs=runs, jobs=2, steps=steps) for _ in range(rng.randint(1, 2))]
        if number != 2:  # once some moment of the start, else while runs are being trained
            until(lambda said=said: speaks(tmp_path, said))
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


def speaks(workdir, before):
    """Whether a sweep that was not there before has said what it does."""
    return any(path.stat().st_size for path in set(workdir.glob('sweep_*.txt')) - before)


def kill_one_training(workdir, rng):
    """kill -9 of a training that holds the lock of its run."""
    folders = [path for path in sorted(workdir.glob('run-*')) if sweep_status.is_locked(path)]
    started = [starts_of(folder)[-1][0] for folder in folders if starts_of(folder)]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
        number = rng.choice(started)
        # The number may be that of an earlier start, and by now of a stranger.
        if b'fake_training.py' in pathlib.Path(f'/proc/{number}/cmdline').read_bytes():
            os.kill(number, signal.SIGKILL)


# ---- real training -----------------------------------------------------------------------------


@pytest.mark.soak
def test_a_sweep_trains_a_real_policy_and_finds_it_done_afterwards(tmp_path):
    """One micro run, started by the command line; its folder has an = and a comma in its name."""
    listed = tmp_path / 'listed.py'
    listed.write_text("def sweep(add):\n    add(seed=3, **{'optim.lr': 0.002})\n")
    words = [
        sys.executable,
        '-m',
        'agentrl_jax.sweep',
        '--config=tests/micro_runs.py',
        f'--sweep={listed}',
        f'--workdir={tmp_path}/w',
        '--config.steps=1',
        '--config.clone.episodes=0',
        '--config.loss.kl_coef=0',
        '--config.loss.kl_target=0',
        '--config.log.rollouts_every=0',
    ]
    done = subprocess.run(
        words,
        cwd=micro_runs.ROOT,
        env=micro_runs.environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / 'w').glob('seed=3,lr=0.002-*')
    assert run_log.finished_step(folder) == 1 and checkpoint.steps(folder / 'checkpoints') == [0, 1]
    planned, used = (json.loads((folder / f'{n}.json').read_text()) for n in ('run', 'config'))
    assert planned['config'] == used['config'] and used['config']['seed'] == 3
    assert 'held-out success' in (folder / 'output.txt').read_text()
    again = subprocess.run(
        [*words, '--launcher=print'],
        cwd=micro_runs.ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert again.stdout == '' and f'{folder.name} is done' in again.stderr
