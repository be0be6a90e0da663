"""tpu_scripts with the training itself: two hosts of this machine, and what a bucket must hold."""

import json
import os
import signal
import socket

import micro_runs
import pytest
from tpu_bench import Bench, eventually, group

from agentrl_jax.records import run_log

pytestmark = pytest.mark.soak

STEPS = 4


def free_port():
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        return probe.getsockname()[1]


@pytest.fixture
def local(tmp_path):
    wanted = micro_runs.environment(JAX_NUM_CPU_DEVICES='1')
    bench = Bench(tmp_path / 'x', 'local', TPU_LOCAL_PORT=str(free_port()), TPU_GRACE='60')
    bench.environment |= {name: wanted[name] for name in wanted if name.startswith(('JAX', 'XLA'))}
    bench.environment |= {'PYTHONPATH': '.:tests', 'TPU_POLL': '0.5'}  # of the copy that hosts have
    yield bench
    bench.call('delete', 'demo', '--yes')


def test_babysit_brings_training_on_two_hosts_through_a_signal(local):
    """One process of two is asked to stop: both save the same step, and the run ends all the same.

    What hosts that vanish leave behind: test_distributed_training.py, with fake training
    test_tpu_scripts.py.
    """
    run = local.buckets / 'my-bucket' / 'runs' / 'run'  # where setup puts runs/
    babysit = local.start(
        'babysit',
        'demo',
        '--',
        'python',
        '-m',
        'agentrl_jax.train',
        '--config=tests/micro_runs.py',
        '--workdir=runs/run',
        '--config.mesh.data=2',
        f'--config.steps={STEPS}',
        '--config.eval.every=0',
        '--config.loss.kl_coef=0',  # few programs
        '--config.loss.kl_target=0',
        '--config.clone.episodes=0',
        '--config.checkpoint.every=1',
        '--config.log.rollouts_every=0',
    )
    eventually(lambda: (run / 'checkpoints' / '1').is_dir(), within_s=240, while_runs=babysit)
    os.killpg(group(local, 1), signal.SIGTERM)
    said = local.end(babysit, within_s=240)
    assert 'again, from the last checkpoint' in said
    rows = run_log.read_metrics(run / run_log.METRICS_FILE)
    assert [row['step'] for row in rows] == list(range(STEPS + 1))
    assert json.loads((run / run_log.FINISHED_FILE).read_text())['step'] == STEPS
