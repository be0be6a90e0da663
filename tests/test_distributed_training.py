"""Whole runs over several devices and processes: the same tokens, the same parameters."""

import json
import signal
import socket
import subprocess
import sys
import time

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax.machine import checkpoint
from agentrl_jax.machine import processes as runtime
from agentrl_jax.records import run_log

# Adam divides a gradient by its own size: where it is 0 but for rounding (biases of the keys hardly
# move attention) the parameter moves by lr times noise. At lr 1e-3 that is 1e-4, of tokens alike.
LR, STEPS = 1e-5, 6
ARGUMENTS = [
    f'--config.steps={STEPS}',
    '--config.eval.every=2',
    f'--config.log.rollouts_every={STEPS}',  # pages of the first step and of the last
    f'--config.optim.lr={LR}',
    f'--config.optim.critic_lr={LR}',
    f'--config.clone.lr={LR}',
    '--config.clone.steps=3',
    '--config.checkpoint.keep=9',
    '--config.curriculum.stage_steps=1',  # one turn at step 0, two from then on
]


class Cluster:
    """Finished runs by (processes, devices of each, further arguments)."""

    def __init__(self, folder):
        self.folder, self.finished = folder, {}

    def run(self, processes, devices, *arguments):
        """Workdir of a run in so many processes; started once."""
        asked = (processes, devices, arguments)
        if asked not in self.finished:
            workdir = self.folder / f'run{len(self.finished)}'
            started = self.start(workdir, processes, devices, *ARGUMENTS, *arguments)
            for code, text in finish(started):
                assert code == 0, text
            self.finished[asked] = workdir
        return self.finished[asked]

    def start(self, workdir, processes, devices, *arguments):
        """The processes of a run."""
        with socket.socket() as probe:
            probe.bind(('localhost', 0))
            port = probe.getsockname()[1]
        joined = (
            {}
            if processes == 1
            else {
                'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
                'JAX_NUM_PROCESSES': str(processes),
            }
        )
        shared = micro_runs.environment(JAX_NUM_CPU_DEVICES=str(devices), **joined)
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    '-m',
                    'agentrl_jax.train',
                    '--config=tests/micro_runs.py',
                    f'--workdir={workdir}',
                    *arguments,
                ],
                cwd=micro_runs.ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=shared if processes == 1 else {**shared, 'JAX_PROCESS_ID': str(index)},
            )
            for index in range(processes)
        ]


def finish(started):
    """(exit code, output) of each process; nobody is left behind."""
    try:
        said = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def wait_for(happened, started):
    """Returns when it has happened; fails when a process ends before."""
    deadline = time.monotonic() + 600
    while not happened():
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            for process in started:
                process.kill()
            raise AssertionError(finish(started))
        time.sleep(0.02)


def reached(workdir, step):
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    return any(row['step'] >= step for row in rows)


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    return Cluster(tmp_path_factory.mktemp('cluster'))


def saved(workdir, step=None):
    return micro_runs.saved_state(micro_runs.get_config(), workdir, step)


def furthest(one, other):
    """Largest difference of any number."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def sampled(workdir):
    """Tokens of the first and the last training rollout, episode by episode."""
    pages = [json.loads(page.read_text()) for page in sorted(workdir.glob('rollouts/*.json'))]
    assert len(pages) == 2
    return [
        [token['s'] for token in episode['tokens']]
        for page in pages
        for episode in page['episodes']
    ]


def assert_same_training(workdir, other):
    one, two = saved(workdir), saved(other)
    assert int(one.step) == int(two.step) == STEPS
    assert sampled(workdir) == sampled(other)
    assert furthest(one, two) <= 1e-6  # parameters, critic, moments
    assert furthest(one.params, saved(workdir, 0).params) > 2 * LR
    rows, expected = (run_log.read_metrics(w / run_log.METRICS_FILE) for w in (workdir, other))
    assert [row['rollout/horizon'] for row in rows[:3]] == [1, 2, 2]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys() and row['perf/recompiles'] == 0
        for name in ('rollout/return', 'eval/return', 'batch/trained_tokens'):
            assert name not in row or row[name] == pytest.approx(wanted[name], rel=1e-5)


@pytest.mark.soak
def test_two_processes_train_on_several_worlds(cluster):
    mix = (
        "--config.env.mix=(('frozen_lake', .5), ('bandit', .5))",
        '--config.eval.every=0',
        '--config.steps=1',
        '--config.loss.kl_coef=0',  # few programs
        '--config.loss.kl_target=0',
        '--config.clone.episodes=0',
    )
    workdir = cluster.run(2, 1, *mix)
    row = run_log.read_metrics(workdir / run_log.METRICS_FILE)[0]
    for name in ('return', 'tokens'):
        each = [row[f'rollout_{world}/{name}'] for world in ('frozen_lake', 'bandit')]
        assert row[f'rollout/{name}'] == pytest.approx(sum(each) / 2, rel=1e-5)
    made = {path.name for path in (workdir / 'rollouts').glob('*.html')}
    assert made == {'frozen_lake_step_000000.html', 'bandit_step_000000.html'}


@pytest.fixture(scope='module')
def disturbed(cluster):
    """(workdir, steps saved at SIGTERM and at the loss, endings) of a run of 2 x 2 devices.

    Of two processes one is asked to stop; two go on, until one is killed; one of eight devices
    goes on alone.
    """
    workdir = cluster.folder / 'disturbed'
    more = ('--config.checkpoint.every=1', '--config.mesh.data=2', '--config.mesh.fsdp=2')
    started = cluster.start(workdir, 2, 2, *ARGUMENTS, *more)
    wait_for(lambda: reached(workdir, 0), started)
    started[1].send_signal(signal.SIGTERM)
    endings = [finish(started)]
    saved_steps = checkpoint.steps(workdir / 'checkpoints')
    started = cluster.start(workdir, 2, 2, *ARGUMENTS, *more)
    wait_for(lambda: checkpoint.steps(workdir / 'checkpoints')[-1] > saved_steps[-1], started)
    started[0].kill()  # the one that coordinates, writes and holds the workdir
    endings.append(finish(started))
    left = checkpoint.steps(workdir / 'checkpoints')
    endings.append(finish(cluster.start(workdir, 1, 8, *ARGUMENTS, more[0])))
    return workdir, saved_steps, left, endings


@pytest.mark.soak
def test_two_processes_then_one_of_eight_devices_train_like_one_through_a_signal_and_a_loss(
    cluster, disturbed
):
    """Rows over all four devices, parameters over pairs: cloning, updates, checkpoint, page.

    How a run over two processes ends when nothing disturbs it: test_tpu_training.py. Four of them
    at a signal: test_multiprocess.py.
    """
    workdir, saved_steps, left, (asked, lost, last) = disturbed
    assert [code for code, _ in asked] == [runtime.EXIT_PREEMPTED] * 2, asked
    assert [f'training 1/{STEPS}' in text for _, text in asked] == [True, False]
    assert saved_steps[0] == 0 and 0 < saved_steps[-1] < left[-1] < STEPS
    (killed, _), (code, text) = lost
    assert killed == -signal.SIGKILL and code not in (0, runtime.EXIT_PREEMPTED, killed), text
    assert 'process 1 of 2 ends' in text or 'distributed service detected' in text
    ((code, text),) = last
    assert code == 0 and f'step {left[-1]}: compiling' in text and 'resume  ' in text, text
    assert_same_training(workdir, cluster.run(1, 1))
