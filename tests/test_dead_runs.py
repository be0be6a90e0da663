"""A run that trains nothing does not end as a success."""

import math

import micro_runs
import pytest

from agentrl_jax import train
from agentrl_jax.records import run_log

pytestmark = pytest.mark.usefixtures('quick_runs')


@pytest.mark.parametrize('patience, rows', [(5, 4), (2, 2)])
def test_a_run_whose_every_update_is_skipped_ends_with_exit_code_1(
    patience, rows, tmp_path, capsys
):
    """A loss beyond float32: said at the end of a short run, or by the alarm."""
    changes = {
        'loss.entropy_coef': 3e38,
        'log.rollouts_every': 0,
        'alarm.skipped.patience': patience,
    }
    cfg = micro_runs.config('frozen_lake', algorithm='grpo', **changes)
    assert train.train(cfg, str(tmp_path)) == 1
    found = run_log.read_metrics(tmp_path / run_log.METRICS_FILE)
    assert len(found) == rows and not (tmp_path / 'finished.json').exists()
    for row in found[:2]:
        assert row['update/applied'] == 0 and row['update/skipped'] == 2
        assert math.isnan(row['policy/grad_norm']) or math.isinf(row['policy/grad_norm'])
    said = capsys.readouterr()
    assert 'nothing was trained' in said.err + said.out or 'optimiser steps' in said.err + said.out
