"""A whole run that goes back to a checkpoint: what it keeps, what it removes, killed in between."""

import dataclasses

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import train
from agentrl_jax.machine import checkpoint
from agentrl_jax.measure import metrics
from agentrl_jax.records import run_log
from agentrl_jax.run import roll_back

# Entropy is above 0 x its start in every row after the first three: an alarm in step 4 that began
# in step 3. Checkpoints 0, 2 and 4 are there: 2 is restored, 4 is removed. In its second life the
# same alarm comes again, and one roll back is allowed.
SETTINGS = {
    'steps': 7,
    'eval.every': 0,
    'checkpoint.every': 2,
    'checkpoint.keep': 3,
    'log.rollouts_every': 0,
    'alarm.baseline_steps': 3,
    'alarm.entropy_rise.action': 'roll_back',
    'alarm.entropy_rise.limit': 0.0,
    'alarm.entropy_rise.patience': 2,
    'alarm.max_roll_backs': 1,
    'alarm.mi_every': 3,
    'alarm.mi_text': 'answer',
    'alarm.mi_pairs': 8,
}
KILLED = 'killed here'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('runs')


def rows_of(workdir):
    return run_log.read_metrics(workdir / run_log.METRICS_FILE)


@pytest.fixture(scope='module')
def undisturbed(folder, quick_runs):
    """(workdir, its config, exit code)."""
    cfg = micro_runs.config('frozen_lake', **SETTINGS)
    return folder / 'undisturbed', cfg, train.train(cfg, folder / 'undisturbed')


@pytest.mark.parametrize('error', [ValueError, RuntimeError])  # a device's errors are the latter
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
        train.train(micro_runs.config('frozen_lake', **SETTINGS), folder / 'fails')
    assert waited == [(folder / 'fails' / 'checkpoints').resolve()]


@pytest.mark.parametrize('text', ['', '5', '[1]', '[{"at_step": 3}]', '[{"to_step": null}]'])
def test_a_list_of_roll_backs_that_was_changed_is_named(tmp_path, text):
    (tmp_path / run_log.ROLL_BACKS_FILE).write_text(text)
    with pytest.raises(ValueError, match=run_log.ROLL_BACKS_FILE):
        run_log.read_roll_backs(tmp_path)


def test_the_run_goes_back_once_and_then_stops(undisturbed):
    workdir, cfg, code = undisturbed
    assert code == 1
    (past,) = run_log.read_roll_backs(workdir)
    assert (past['at_step'], past['to_step'], past['signal']) == (4, 2, 'entropy_rise')
    rows, lost = rows_of(workdir), run_log.read_metrics(workdir / 'metrics_abandoned_1.jsonl')
    assert [row['step'] for row in rows] == [0, 1, 2, 3, 4]
    assert [row['step'] for row in lost] == [2, 3, 4]
    assert [row['alarm/roll_backs'] for row in rows] == [0, 0, 1, 1, 1]
    assert [row['alarm/level'] for row in rows] == [0, 0, 0, 1, 2]
    # other seeds: the second life plays other episodes from the same parameters
    assert lost[0]['policy/grad_norm'] != rows[2]['policy/grad_norm']
    assert checkpoint.steps(workdir / 'checkpoints') == [2, 4, 5]  # this 4 is of the second life
    assert checkpoint.read_extra(workdir, step=4)['roll_backs'] == 1
    assert checkpoint.read_extra(workdir, step=2)['roll_backs'] == 0
    assert not list((workdir / 'checkpoints').glob('*.removed'))
    assert all(row['perf/recompiles'] == 0 for row in rows)
    assert [row['step'] for row in rows if 'collapse/mi' in row] == [0, 3]
    assert all(np.isfinite(rows[0][name]) for name in metrics.METRICS if name[:8] == 'collapse')
    assert 0 <= rows[0]['collapse/retrieval_accuracy'] <= 1


@pytest.mark.parametrize('moment', ['before', 'after'])
def test_a_run_killed_around_its_roll_back_is_the_same_run(
    undisturbed, folder, monkeypatch, moment
):
    expected, cfg, _ = undisturbed
    workdir, record = folder / f'killed_{moment}', roll_back.record

    def killed(*args, **kwargs):
        if moment == 'after':
            record(*args, **kwargs)
        raise KeyboardInterrupt(KILLED)

    with monkeypatch.context() as patch:
        patch.setattr(roll_back, 'record', killed)
        with pytest.raises(KeyboardInterrupt, match=KILLED):
            train.train(cfg, workdir)
    assert train.train(cfg, workdir) == 1
    rows, undisturbed_rows = (micro_runs.without_times(rows_of(w)) for w in (workdir, expected))
    assert rows == undisturbed_rows
    assert run_log.read_roll_backs(workdir) == run_log.read_roll_backs(expected)
    one, other = (micro_runs.saved_state(cfg, w) for w in (workdir, expected))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_rate_falls_with_each_roll_back_and_the_run_may_go_on(undisturbed, monkeypatch):
    """alarm may change in a resumed run: here it only warns, and the run reaches its end."""
    workdir, _, _ = undisturbed
    cfg = micro_runs.config('frozen_lake', **SETTINGS | {'alarm.entropy_rise.action': 'warn'})
    scales, build = [], train.build

    def watched(cfg):
        run = build(cfg)
        learn = run.training.learn

        def noting(*args):
            scales.append(float(args[-2]))
            return learn(*args)

        training = dataclasses.replace(run.training, learn=noting)
        return dataclasses.replace(run, training=training)

    monkeypatch.setattr(train, 'build', watched)
    assert train.train(cfg, workdir) == 0
    assert scales == [0.5, 0.5]  # steps 5 and 6
    assert [row['alarm/roll_backs'] for row in rows_of(workdir)] == [0, 0] + [1] * 6
