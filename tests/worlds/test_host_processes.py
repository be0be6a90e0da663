"""Several processes play against their own worlds, and train like one process."""

import pytest
import test_distributed_training as distributed

from agentrl_jax.records import run_log
from agentrl_jax.rollout import replies

pytestmark = pytest.mark.soak

HOSTS = {
    'env.name': 'objects',
    'objects.make_object': 'host_worlds:Echo',
    'hosts.instruction': 'Say something.',
    'hosts.max_observation': 40,
    'hosts.read_tokens': 16,
    'rollout.max_tokens': 160,
    'clone.episodes': 0,
}


def test_two_processes_train_like_one_against_hosts(tmp_path):
    """Each process plays its rows on its device and logs the replies of its worlds."""
    words = [f'--config.{name}={value}' for name, value in HOSTS.items()]
    two, one = tmp_path / 'two', tmp_path / 'one'
    for workdir, count in ((two, 2), (one, 1)):
        for code, text in distributed.finish(distributed.start(workdir, count, 2 // count, *words)):
            assert code == 0, text
    distributed.assert_same_training(two, one, HOSTS)
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


def metrics_of(workdir):
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    return [row for row in rows if 'hosts/cut' in row]
