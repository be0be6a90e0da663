"""Whole runs over several devices and processes: the same tokens, the same parameters."""

import json
import shutil
import socket
import subprocess
import sys

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import checkpoint, run_log

pytestmark = pytest.mark.slow
# Adam divides a gradient by its own size: where it is 0 but for rounding (biases of the keys hardly
# move attention) the parameter moves by lr times noise. At lr 1e-3 that is 1e-4, of tokens alike.
LR = 1e-5
ARGUMENTS = [
    '--config.steps=3', '--config.eval.every=2', '--config.log.rollouts_every=0',
    f'--config.optim.lr={LR}', f'--config.optim.critic_lr={LR}',
    f'--config.clone.lr={LR}', '--config.clone.steps=3',
    '--config.curriculum.stage_steps=1',  # one turn at step 0, two from then on
]  # fmt: skip


class Cluster:
    """Finished runs by (processes, devices of each, further arguments)."""

    def __init__(self, folder):
        self.folder, self.finished = folder, {}

    def run(self, processes, devices, *arguments):
        """Workdir of a run in so many processes; started once."""
        asked = (processes, devices, arguments)
        if asked not in self.finished:
            workdir = self.folder / f'run{len(self.finished)}'
            self.train(workdir, processes, devices, *ARGUMENTS, *arguments)
            self.finished[asked] = workdir
        return self.finished[asked]

    def train(self, workdir, processes, devices, *arguments):
        """Trains in the workdir to the end; what the processes printed."""
        with socket.socket() as probe:
            probe.bind(('localhost', 0))
            port = probe.getsockname()[1]
        started = []
        for index in range(processes):
            alone = processes == 1
            joined = {} if alone else {
                'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
                'JAX_NUM_PROCESSES': str(processes), 'JAX_PROCESS_ID': str(index),
            }  # fmt: skip
            started.append(
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
                    env=micro_runs.environment(
                        self.folder / 'programs', JAX_NUM_CPU_DEVICES=str(devices), **joined
                    ),
                )  # fmt: skip
            )
        try:
            said = [process.communicate(timeout=280)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, said, strict=True):
            assert process.returncode == 0, text
        return said


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp('cluster')
    programs = micro_runs.compilation_cache(folder / 'programs_here')
    next(programs)
    yield Cluster(folder)
    next(programs, None)


def saved(workdir, step=None):
    return micro_runs.saved_state(micro_runs.get_config(), workdir, step)


def furthest(one, other):
    """Largest difference of any number."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def sampled(workdir):
    """Tokens of the last training rollout, episode by episode."""
    page = json.loads((workdir / 'rollouts' / 'step_000002.json').read_text())
    return [[token['s'] for token in episode['tokens']] for episode in page['episodes']]


def assert_same_training(workdir, other):
    one, two = saved(workdir), saved(other)
    assert int(one.step) == int(two.step) == 3
    assert sampled(workdir) == sampled(other)
    assert furthest(one, two) <= 1e-6  # parameters, critic, moments
    assert furthest(one.params, saved(workdir, 0).params) > 2 * LR
    rows, expected = (run_log.read_metrics(w / run_log.METRICS_FILE) for w in (workdir, other))
    assert [row['rollout/horizon'] for row in rows[:3]] == [1, 2, 2]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys() and row['perf/recompiles'] == 0
        for name in ('rollout/return', 'eval/return', 'batch/trained_tokens'):
            assert name not in row or row[name] == pytest.approx(wanted[name], rel=1e-5)


def test_eight_devices_train_like_one(cluster):
    assert_same_training(cluster.run(1, 8), cluster.run(1, 1))


def test_two_processes_of_two_devices_train_like_one_of_one(cluster):
    """Rows over all four devices, parameters over pairs: cloning, updates, checkpoint, page."""
    workdir = cluster.run(2, 2, '--config.mesh.data=2', '--config.mesh.fsdp=2')
    assert checkpoint.steps(workdir / 'checkpoints') == [0, 3]
    assert_same_training(workdir, cluster.run(1, 1))


def test_one_process_goes_on_where_two_stopped(cluster, tmp_path):
    """It restores the checkpoint of the two on its own mesh, and does what it would have done."""
    shared, alone = (
        shutil.copytree(workdir, tmp_path / workdir.name)
        for workdir in (
            cluster.run(2, 2, '--config.mesh.data=2', '--config.mesh.fsdp=2'), cluster.run(1, 1)
        )
    )  # fmt: skip
    for workdir in (shared, alone):
        cluster.train(workdir, 1, 1, *ARGUMENTS, '--config.steps=4')
        rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
        assert [row['step'] for row in rows] == [0, 1, 2, 3, 4]
    assert int(saved(shared).step) == 4 and furthest(saved(shared), saved(alone)) <= 1e-6
