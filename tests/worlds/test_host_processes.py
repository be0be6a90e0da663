"""Several processes play against worlds of their own, and train like one."""

import pytest
import test_distributed_training as distributed

from agentrl_jax.records import run_log
from agentrl_jax.rollout import replies

pytestmark = pytest.mark.soak

HOSTS = [
    '--config.env.name=objects',
    '--config.objects.make_object=host_worlds:Echo',
    '--config.objects.instruction=Say something.',
    '--config.hosts.max_observation=40',
    '--config.hosts.read_tokens=16',
    '--config.rollout.max_tokens=160',
    '--config.clone.episodes=0',
    '--config.optim.lr=1e-5',
]


def test_two_processes_train_like_one_against_hosts(tmp_path):
    """Each plays its own rows on its own device and logs what its own worlds say."""
    cluster = distributed.Cluster(tmp_path)
    two, one = (cluster.run(processes, 2 // processes, *HOSTS) for processes in (2, 1))
    distributed.assert_same_training(two, one)
    logs = [replies.read_log(path) for path in sorted(two.glob('replies*.jsonl'))]
    streams = [{row['stream'] for row in log if row['split'] == 'train'} for log in logs]
    assert len(logs) == 2 and streams[0].isdisjoint(streams[1])
    assert streams[0] | streams[1] == set(range(16))
    # Figures are of the worlds of both.
    for row, alone in zip(*map(metrics_of, (two, one)), strict=True):
        assert row['hosts/cut'] == alone['hosts/cut'] > 0
        here = row['step'], 'train'
        of_step = [line for log in logs for line in log if (line['step'], line['split']) == here]
        slowest = max(line['seconds'] for line in of_step)
        assert row['hosts/slowest_s'] == pytest.approx(slowest, abs=1e-5)


def metrics_of(workdir):
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    return [row for row in rows if 'hosts/cut' in row]
