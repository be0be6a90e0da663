"""How a run ends: by an alarm, by an error, and with a damaged checkpoint."""

import micro_runs
import pytest

from agentrl_jax import train
from agentrl_jax.machine import checkpoint
from agentrl_jax.measure import collapse
from agentrl_jax.records import run_log

# Entropy is above 0 x its start in every row after the first three: an alarm in step 4
SETTINGS = {
    'steps': 7,
    'eval.every': 0,
    'checkpoint.every': 2,
    'checkpoint.keep': 3,
    'log.rollouts_every': 0,
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('runs')


@pytest.mark.soak
@pytest.mark.parametrize(
    'stop, code, steps', [(('entropy_rise',), 1, 5), pytest.param((), 0, 8, marks=pytest.mark.soak)]
)
def test_an_alarm_stops_a_run_or_warns(stop, code, steps, tmp_path, quick_runs, monkeypatch):
    monkeypatch.setattr(collapse, 'BASELINE_STEPS', 3)
    signal = collapse.SIGNALS['entropy_rise']._replace(limit=0.0, patience=2)
    monkeypatch.setitem(collapse.SIGNALS, 'entropy_rise', signal)
    cfg = micro_runs.config('frozen_lake', **SETTINGS | {'alarm.stop': stop})
    assert train.train(cfg, tmp_path) == code
    rows = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert [row['step'] for row in rows] == list(range(steps))
    assert [row['alarm/level'] for row in rows][:5] == [0, 0, 0, 1, 2]
    assert checkpoint.steps(tmp_path / 'checkpoints')[-1] == min(steps, 7)


@pytest.mark.parametrize('error', [ValueError, RuntimeError])  # device errors are RuntimeErrors
def test_a_run_that_fails_waits_for_the_checkpoint_that_is_being_written(
    error, folder, monkeypatch
):
    waited = []

    def fail(*_):
        waited.clear()
        raise error('all worlds failed')

    monkeypatch.setattr(train, 'play', fail)
    monkeypatch.setattr(train.checkpoint, 'wait', lambda ckpts: waited.append(ckpts.directory))
    with pytest.raises(error, match='all worlds failed'):
        train.train(micro_runs.config('frozen_lake', **SETTINGS), folder / error.__name__)
    assert waited == [(folder / error.__name__ / 'checkpoints').resolve()]
