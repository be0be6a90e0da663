"""Runs end by an alarm, by an error, and when nothing trains."""

import math

import jax
import micro_runs
import pytest

from agentrl_jax import train
from agentrl_jax.machine import checkpoint
from agentrl_jax.measure import collapse
from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.records import run_log

# Entropy is above 0 x its start in every row after the first three: an alarm in step 4
SETTINGS = {
    'steps': 7,
    'eval.every': 0,
    'checkpoint.every': 2,
    'checkpoint.keep': 3,
    'log.rollouts_every': 0,
}


@pytest.mark.soak
@pytest.mark.parametrize('stop, code, steps', [(('entropy_rise',), 1, 5), ((), 0, 8)])
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


def test_a_failed_run_waits_for_the_checkpoint_that_is_being_written(
    tmp_path, quick_runs, monkeypatch
):
    waited = []

    def fail(*_):
        waited.clear()
        raise RuntimeError('all worlds failed')  # errors of a device are RuntimeErrors too

    monkeypatch.setattr(train, 'play', fail)
    monkeypatch.setattr(train.checkpoint, 'wait', lambda ckpts: waited.append(ckpts.directory))
    with pytest.raises(RuntimeError, match='all worlds failed'):
        train.train(micro_runs.config('frozen_lake', **SETTINGS), tmp_path)
    assert waited == [(tmp_path / 'checkpoints').resolve()]


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
@pytest.mark.parametrize('patience, rows', [(5, 4), (2, 2)])
def test_a_run_that_skips_every_update_ends_with_exit_code_1(
    patience, rows, tmp_path, capsys, monkeypatch
):
    """A loss beyond float32 is reported at the end of a short run, or by the alarm."""
    signal = collapse.SIGNALS['skipped']._replace(patience=patience)
    monkeypatch.setitem(collapse.SIGNALS, 'skipped', signal)
    changes = {'loss.entropy_coef': 3e38, 'log.rollouts_every': 0}
    cfg = micro_runs.config('frozen_lake', algorithm='grpo', **changes)
    assert train.train(cfg, str(tmp_path)) == 1
    metrics = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert len(metrics) == rows and not (tmp_path / 'finished.json').exists()
    for row in metrics[:2]:
        assert row['update/applied'] == 0 and row['update/skipped'] == 2
        assert math.isnan(row['policy/grad_norm']) or math.isinf(row['policy/grad_norm'])
    logs = capsys.readouterr()
    assert 'nothing was trained' in logs.err + logs.out or 'optimiser steps' in logs.err + logs.out


@pytest.mark.soak
@pytest.mark.usefixtures('quick_runs')
def test_episodes_with_nonfinite_values_end_the_run(tmp_path, monkeypatch):
    """Its metrics would show a success of 0. The counts are logged, and no step is saved."""
    init = Qwen2.init
    monkeypatch.setattr(
        Qwen2, 'init', lambda self, key: jax.tree.map(lambda x: x * 1e19, init(self, key))
    )
    changes = {'log.rollouts_every': 0, 'checkpoint.every': 1}
    cfg = micro_runs.config('frozen_lake', algorithm='grpo', **changes)
    with pytest.raises(ValueError, match='step 0, validation episodes: .* are not finite'):
        train.train(cfg, str(tmp_path / 'validated'))
    monkeypatch.setattr(train, 'validate', lambda *run: {'eval/success': math.nan})
    with pytest.raises(ValueError, match='step 0, training episodes: .* are not finite'):
        train.train(cfg, str(tmp_path / 'trained'))
    (row,) = run_log.read_metrics(tmp_path / 'trained' / run_log.METRICS_FILE)
    assert row['rollout/nonfinite'] > 0
    assert [path.name for path in (tmp_path / 'trained/checkpoints').glob('?')] == ['0']
