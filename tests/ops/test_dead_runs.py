"""A run that trains nothing does not end as a success."""

import math

import jax
import micro_runs
import pytest

from agentrl_jax import train
from agentrl_jax.measure import collapse
from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.records import run_log

pytestmark = pytest.mark.usefixtures('quick_runs')


@pytest.mark.soak
@pytest.mark.parametrize('patience, rows', [(5, 4), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_a_run_whose_every_update_is_skipped_ends_with_exit_code_1(
    patience, rows, tmp_path, capsys, monkeypatch
):
    """A loss beyond float32 is reported at the end of a short run, or by the alarm."""
    signal = collapse.SIGNALS['skipped']._replace(patience=patience)
    monkeypatch.setitem(collapse.SIGNALS, 'skipped', signal)
    changes = {'loss.entropy_coef': 3e38, 'log.rollouts_every': 0}
    cfg = micro_runs.config('frozen_lake', algorithm='grpo', **changes)
    assert train.train(cfg, str(tmp_path)) == 1
    found = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert len(found) == rows and not (tmp_path / 'finished.json').exists()
    for row in found[:2]:
        assert row['update/applied'] == 0 and row['update/skipped'] == 2
        assert math.isnan(row['policy/grad_norm']) or math.isinf(row['policy/grad_norm'])
    said = capsys.readouterr()
    assert 'nothing was trained' in said.err + said.out or 'optimiser steps' in said.err + said.out


@pytest.mark.soak
def test_training_episodes_of_a_policy_that_is_not_finite_end_the_run(tmp_path, monkeypatch):
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
