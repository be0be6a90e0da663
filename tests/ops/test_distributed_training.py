"""Complete runs over several devices and processes give the same tokens and parameters."""

import json
import signal
import subprocess
import sys
import time

import jax
import micro_runs
import numpy as np
import pytest
from test_multiprocess import variables_of

from agentrl_jax.machine import checkpoint, processes
from agentrl_jax.records import run_log
from agentrl_jax.rollout import replies

# Adam divides a gradient by its size. A gradient that is 0 up to rounding (key biases hardly affect
# attention) moves its parameter by lr times noise: 1e-4 at lr 1e-3, with identical tokens.
LR, STEPS = 1e-5, 6
WORLDS = ('frozen_lake', 'bandit')
MIX = "--config.env.mix=(('frozen_lake', .5), ('bandit', .5))"
ARGUMENTS = [
    f'--config.steps={STEPS}',
    '--config.eval.every=2',
    f'--config.log.rollouts_every={STEPS - 1}',  # reports of the first and last step
    f'--config.optim.lr={LR}',
    f'--config.optim.critic_lr={LR}',
    f'--config.clone.lr={LR}',
    '--config.clone.steps=3',
    '--config.checkpoint.keep=9',
    '--config.checkpoint.every=1',
    '--config.curriculum.stage_steps=1',  # one turn at step 0, then two
]


def start(workdir, count, devices, *arguments):
    """Start a run in `count` processes."""
    words = ['-m', 'agentrl_jax.train', '--config=tests/micro_runs.py', f'--workdir={workdir}']
    joined = variables_of(count) if count > 1 else [{}]
    return [
        subprocess.Popen(
            [sys.executable, *words, *ARGUMENTS, *arguments],
            cwd=micro_runs.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=micro_runs.environment(JAX_NUM_CPU_DEVICES=str(devices), **variables),
        )
        for variables in joined
    ]


def finish(started):
    """Return (exit code, output) of each process; kill the remaining ones."""
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, outputs, strict=True)]


def wait_for(condition, started):
    """Wait until condition() is true; fail if a process ends first."""
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            for process in started:
                process.kill()
            raise AssertionError(finish(started))
        time.sleep(0.02)


def saved(workdir, changes, step=None):
    cfg = micro_runs.get_config()
    cfg.update_from_flattened_dict(changes)
    return micro_runs.saved_state(cfg, workdir, step)


def max_difference(one, other):
    """Return the largest absolute difference."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def sampled_tokens(workdir):
    """Return the tokens of the first and last training rollout, by episode."""
    pages = [json.loads(page.read_text()) for page in sorted(workdir.glob('rollouts/*.json'))]
    return [
        [token['s'] for token in episode['tokens']]
        for page in pages
        for episode in page['episodes']
    ]


def assert_same_training(workdir, other, changes):
    """changes: config fields of the runs that differ from micro_runs."""
    one, two = saved(workdir, changes), saved(other, changes)
    assert int(one.step) == int(two.step) == STEPS
    assert sampled_tokens(workdir) == sampled_tokens(other) != []
    assert max_difference(one, two) <= 1e-6  # parameters, critic, moments
    assert max_difference(one.params, saved(workdir, changes, 0).params) > 2 * LR
    rows, expected = (run_log.read_metrics(w / run_log.METRICS_FILE) for w in (workdir, other))
    assert [row['rollout/horizon'] for row in rows[:3]] == [1, 2, 2]
    for row, expected_row in zip(rows, expected, strict=True):
        assert row.keys() == expected_row.keys() and row['perf/recompiles'] == 0
        for name in ('rollout/return', 'eval/return', 'batch/trained_tokens'):
            assert name not in row or row[name] == pytest.approx(expected_row[name], rel=1e-5)
    return rows


@pytest.mark.soak
def test_two_processes_then_one_with_eight_devices_train_like_one_despite_kills(tmp_path):
    """Rows over four devices, parameters over pairs: cloning, updates, checkpoints, reports."""
    workdir, other = tmp_path / 'disturbed', tmp_path / 'undisturbed'
    words = (workdir, 2, 2, MIX, '--config.mesh.data=2', '--config.mesh.fsdp=2')
    started = start(*words)
    wait_for(lambda: checkpoint.steps(workdir / 'checkpoints')[-1:] >= [1], started)
    started[1].send_signal(signal.SIGTERM)  # both save the same step
    assert [code for code, _ in finish(started)] == [processes.EXIT_PREEMPTED] * 2
    stopped = checkpoint.steps(workdir / 'checkpoints')[-1]
    started = start(*words)
    wait_for(lambda: checkpoint.steps(workdir / 'checkpoints')[-1] > stopped, started)
    started[0].kill()  # the process that coordinates, writes and locks the workdir
    (killed, _), (code, text) = finish(started)
    assert killed == -signal.SIGKILL
    assert code not in (0, processes.EXIT_PREEMPTED, killed), text
    assert 'process 1 of 2 exits' in text or 'distributed service detected' in text
    left = checkpoint.steps(workdir / 'checkpoints')
    assert left[0] == 0 and left[-1] < STEPS
    ((code, text),) = finish(start(workdir, 1, 8, MIX))
    assert code == 0 and f'step {left[-1]}: compiling' in text and 'resume  ' in text, text
    ((code, text),) = finish(start(other, 1, 1, MIX))
    assert code == 0, text

    mix = {'env.mix': tuple((world, 0.5) for world in WORLDS)}
    rows = assert_same_training(workdir, other, mix)
    for name in ('return', 'tokens'):
        each = [rows[0][f'rollout_{world}/{name}'] for world in WORLDS]
        assert rows[0][f'rollout/{name}'] == pytest.approx(sum(each) / 2, rel=1e-5)


# ---- against worlds on hosts --------------------------------------------------------------------

HOSTS = {
    'env.name': 'objects',
    'objects.make_object': 'host_worlds:Echo',
    'hosts.instruction': 'Say something.',
    'hosts.max_observation': 40,
    'hosts.read_tokens': 16,
    'rollout.max_tokens': 160,
    'clone.episodes': 0,
}


@pytest.mark.soak
def test_two_processes_train_like_one_against_hosts(tmp_path):
    """Each process plays its rows on its device and logs the replies of its worlds."""
    words = [f'--config.{name}={value}' for name, value in HOSTS.items()]
    two, one = tmp_path / 'two', tmp_path / 'one'
    for workdir, count in ((two, 2), (one, 1)):
        for code, text in finish(start(workdir, count, 2 // count, *words)):
            assert code == 0, text
    assert_same_training(two, one, HOSTS)
    logs = [replies.read_log(path) for path in sorted(two.glob('replies*.jsonl'))]
    streams = [{row['stream'] for row in log if row['split'] == 'train'} for log in logs]
    assert len(logs) == 2 and streams[0].isdisjoint(streams[1])
    assert streams[0] | streams[1] == set(range(16))
    # Metrics cover the worlds of both processes.
    for row, alone in zip(*map(metrics_of, (two, one)), strict=True):
        assert row['hosts/cut'] == alone['hosts/cut'] > 0
        here = row['step'], 'train'
        of_step = [line for log in logs for line in log if (line['step'], line['split']) == here]
        slowest = max(line['seconds'] for line in of_step)
        assert row['hosts/slowest_s'] == pytest.approx(slowest, abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ('count', 'run'), [(2, 'two_turns'), (2, 'two_turns_responses'), (4, 'two_turns_messages')]
)
def test_processes_train_like_one_with_a_harness(tmp_path, count, run):
    """Each process has an endpoint, plays its rows and logs the requests of its harnesses.

    One of the runs is killed and resumed.
    """
    changes = {'env.name': 'harness', 'harness.run': f'harness_clients:{run}'}
    changes |= {name: HOSTS[name] for name in ('hosts.read_tokens', 'clone.episodes')}
    # An episode that is cut at one turn earns something: see LR about gradients that are 0
    changes |= {'harness.blamed_reward': 0.5, 'rollout.max_tokens': 240}
    words = [f'--config.{name}={value}' for name, value in changes.items()]
    every, one = tmp_path / 'every', tmp_path / 'one'
    if run == 'two_turns_responses':
        started = start(every, count, 1, *words)
        wait_for(lambda: checkpoint.steps(every / 'checkpoints')[-1:] >= [2], started)
        started[1].kill()
        assert all(code != 0 for code, _ in finish(started))
    for workdir, n in ((every, count), (one, 1)):
        for code, text in finish(start(workdir, n, count // n, *words)):
            assert code == 0, text
    assert_same_training(every, one, changes)
    logs = [replies.read_log(path) for path in sorted(every.glob('replies*.jsonl'))]
    assert len(logs) == count and all(logs)


@pytest.mark.soak
def test_episodes_in_flight_over_two_processes_continue_after_a_kill_and_replay(tmp_path):
    """The logs of both processes repeat a run with staleness bit for bit."""
    changes = HOSTS | {'rollout.staleness': 1, 'curriculum.rounds': ()}
    words = [f'--config.{name}={value}' for name, value in changes.items()]
    first, again = tmp_path / 'first', tmp_path / 'again'
    started = start(first, 2, 1, *words)
    wait_for(lambda: checkpoint.steps(first / 'checkpoints')[-1:] >= [2], started)
    started[1].kill()
    assert all(code != 0 for code, _ in finish(started))
    replay = f'--replay={first}/replies.jsonl'
    for workdir, more in ((first, []), (again, [replay])):
        for code, text in finish(start(workdir, 2, 1, *words, *more)):
            assert code == 0, text
    assert sampled_tokens(first) == sampled_tokens(again) != []
    assert max_difference(saved(first, changes), saved(again, changes)) == 0.0
    rows = run_log.read_metrics(first / run_log.METRICS_FILE)
    assert max(row.get('rollout/restarted', 0) for row in rows) > 0


def metrics_of(workdir):
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    return [row for row in rows if 'hosts/cut' in row]
