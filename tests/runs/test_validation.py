"""Validation: samples per level, splits, environments; best policy; rate schedules."""

import json
import types

import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax import evaluate, train
from agentrl_jax.machine import checkpoint
from agentrl_jax.measure import metrics, stats, validation
from agentrl_jax.rl.learning import Optim
from agentrl_jax.run import params
from agentrl_jax.run.migration import canonical_json, to_metadata
from agentrl_jax.text.agents import ONLY_ACTS


class _NoMetrics:
    env_params, agent = None, ONLY_ACTS

    class env:
        @staticmethod
        def episode_metrics(actions, level, params):
            return {}


def summary_of(success, faulty=(), levels=3, samples=2):
    rows = len(success)
    out = toy.rollout_of([[(1, 1)]] * rows, np.zeros((rows, 1)), length=3, faulty=faulty)
    out = out.replace(success=jnp.asarray(success, bool), level=jnp.arange(rows) % levels)
    return validation.summarise(validation.count(out, _NoMetrics, levels=levels, samples=samples))


def test_pass_at_k_and_mean_at_k_by_hand():
    # Three levels, two samples each: level 0 fails twice, 1 passes once, 2 twice; a filler row
    result = summary_of([0, 1, 1, 0, 0, 1, 1])
    assert result['eval/success'] == pytest.approx(3 / 6)
    assert result['eval/pass_at_k'] == pytest.approx(2 / 3)
    # Shares 0, .5, 1: mean .5, variance 1/6; as 3 (.5 . .5) / (1/6) = 4.5 independent episodes.
    # Wilson's, z^2 = 3.841459: margin z sqrt(.25 / 4.5 + z^2 / 81) / (1 + z^2 / 4.5) = 0.339310
    assert result['eval/success_low'] == pytest.approx(0.5 - 0.339310, abs=1e-6)
    assert result['eval/success_high'] == pytest.approx(0.5 + 0.339310, abs=1e-6)
    assert (result['eval/pass_at_k_low'], result['eval/pass_at_k_high']) == stats.wilson_interval(
        2, 3
    )


def test_a_faulty_sample_does_not_count_for_its_level():
    result = summary_of([0, 1, 1, 0, 0, 1], faulty=(0, 3))  # level 0 has none left
    assert result['eval/success'] == pytest.approx(3 / 4)
    assert result['eval/pass_at_k'] == pytest.approx(2 / 2)
    assert result['eval/env_error'] == pytest.approx(2 / 6)


def test_a_validation_without_healthy_episodes_has_no_metrics(tmp_path):
    """Such a validation counted as a success of 0 %, or as the best so far."""
    result = summary_of([1, 1, 1], samples=1, faulty=(0, 1, 2))
    assert result.keys() == summary_of([1, 1, 1], samples=1).keys()
    assert {name for name, x in result.items() if not np.isnan(x)} == {'eval/env_error'}
    assert result['eval/env_error'] == 1
    params.save_if_best(tmp_path, {}, {'step': 0} | result)
    assert not list(tmp_path.iterdir())


def test_the_best_policy_is_compared_with_the_saved_one(tmp_path):
    """The comparison used rows of metrics, which may be lost with a machine."""
    folder = tmp_path / params.BEST_FOLDER

    def saved_steps():
        return checkpoint.steps(folder / checkpoint.FOLDER)

    def validate(step, success):
        saved = {'step': step, 'eval/success': success}
        params.save_if_best(tmp_path, {'w': jnp.float32(step)}, saved)

    for step, success in ((0, 0.3), (10, 0.7), (20, 0.4), (30, 0.7)):
        validate(step, success)
    assert saved_steps() == [10] and checkpoint.read_extra(folder)['eval/success'] == 0.7
    validate(10, 0.7)  # repeated after a kill
    assert saved_steps() == [10]
    (folder / checkpoint.FOLDER / '10' / checkpoint.MARK).write_text('x')
    validate(30, 0.1)  # a damaged best is ignored
    assert saved_steps() == [30]


def broken_run(cfg, probe=True, learns=True):
    """A run with only non-finite log-probabilities in validation; nothing is compiled."""

    def collect(params, task, episodes, key):
        counts = {'overflow': 0, 'generated': 50, 'nonfinite': 49}
        return None, {name: jnp.array([count]) for name, count in counts.items()}

    pool = types.SimpleNamespace(
        collect=collect,
        task=types.SimpleNamespace(env=types.SimpleNamespace(name=cfg.env.name)),
        episodes=None,
        prefix='eval',
        split='validation',
    )
    return types.SimpleNamespace(config=cfg, params=None, worlds={}, pools=[pool], validation=pool)


NONFINITE = '49 of 50 sampled tokens have log-probabilities that are not finite.*rms_norm_eps'


def test_a_validation_of_a_policy_that_is_not_finite_is_an_error():
    run = broken_run(micro_runs.config('frozen_lake'))
    with pytest.raises(ValueError, match=f'step 7, validation episodes: {NONFINITE}'):
        train.validate(run, None, 7)


def test_an_evaluation_of_a_policy_that_is_not_finite_writes_no_result(tmp_path, monkeypatch):
    """Finite weights x 1e19 were evaluated to 0.0 % with exit code 0."""
    monkeypatch.setattr(evaluate, 'build', broken_run)
    cfg = micro_runs.config('frozen_lake', **{'eval.split': 'test'})
    with pytest.raises(ValueError, match=f'random weights, test episodes: {NONFINITE}'):
        evaluate.evaluate(cfg, '', str(tmp_path), None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'success, levels, samples, solved, independent',
    [
        ([0, 1, 1], 3, 1, 2, 3),
        ([1, 0, 1, 1, 0, 1, 0, 0] * 4, 8, 4, 4, 8),  # samples that agree count once
        ([1, 0] * 3, 2, 3, 1, 2),
        ([0] * 32, 8, 4, 0, 8),
    ],
)
def test_levels_that_agree_count_once_in_wilson_s_interval(
    success, levels, samples, solved, independent
):
    """Four equal samples of eight levels had the interval of 32 episodes on the page."""
    result = summary_of(success, levels=levels, samples=samples)
    ends = result['eval/success_low'], result['eval/success_high']
    np.testing.assert_allclose(ends, stats.wilson_interval(solved, independent))
    assert ('eval/pass_at_k' in result) == (samples > 1)


def test_pass_at_each_k_is_unbiased_by_hand():
    out = toy.rollout_of([[(1, 1)]] * 8, np.zeros((8, 1)), length=3, faulty=(7,))
    # Level 0: 1 of 4 solved; level 1: 2 of 3 healthy ones (row 7 failed)
    out = out.replace(success=jnp.array([1, 1, 0, 1, 0, 0, 0, 0], bool), level=jnp.arange(8) % 2)
    sums = validation.count(out, _NoMetrics, levels=2, samples=4)
    expected = {
        1: (1 / 4 + 2 / 3) / 2,
        2: (1 / 2 + 1) / 2,  # 1 - C(3, 2) / C(4, 2), 1 - C(1, 2) / C(3, 2)
        3: (3 / 4 + 1) / 2,
        4: 1.0,  # level 1 has three healthy samples and is excluded
    }
    for k, share in expected.items():
        mean, (low, high) = validation.passes(sums, k)
        assert mean == pytest.approx(share) and 0 <= low <= mean <= high <= 1, k
    assert np.isnan(validation.passes(sums, 5)[0])


def test_evaluations_of_other_settings_and_checkpoints_are_all_saved(tmp_path):
    """An evaluation with eight samples overwrote the greedy evaluation."""
    path = tmp_path / 'evaluation_test.json'

    def record(success, step=3, **settings):
        return {
            'eval/success': success,
            'settings': {'k': 1, 'temperature': 0.5} | settings,
            'checkpoint': {'workdir': 'runs/x', 'step': step},
        }

    untrained = record(0.6, step=None)  # its config differs, for example the prompt
    untrained['checkpoint'] |= {'workdir': '', 'config_hash': 'a'}
    other = untrained | {'checkpoint': untrained['checkpoint'] | {'config_hash': 'b'}}
    for entry in (untrained, other):
        evaluate.keep(tmp_path / 'untrained.json', entry)
    assert len(json.loads((tmp_path / 'untrained.json').read_text())['earlier']) == 1
    path.write_text('{"eval/success": 0.1}')  # from before settings were saved
    for entry in (record(0.2), record(0.3, k=8), record(0.4, step=6), record(0.5)):
        evaluate.keep(path, entry)
    saved = json.loads(path.read_text())
    assert saved['eval/success'] == 0.5 and saved['settings']['k'] == 1
    assert [one['eval/success'] for one in saved['earlier']] == [0.4, 0.3, 0.1]
    assert not any('earlier' in one for one in saved['earlier'])
    for spoiled in ('[1]', '{"earlier": [1]}', '{"earlier": 1}'):
        path.write_text(spoiled)
        with pytest.raises(ValueError, match='is not an evaluation file'):
            evaluate.keep(path, entry)
        assert path.read_text() == spoiled


def test_valid_format_is_nan_if_a_turn_was_not_judged():
    """Environments on hosts that do not report validity were 100 % valid."""
    out = toy.rollout_of([[(1, 1)]] * 2, np.zeros((2, 1)), length=3)
    for judged, share in ((None, 1.0), ([[1], [1]], 1.0), ([[1], [0]], np.nan)):
        known = None if judged is None else jnp.asarray(judged, bool)
        sums = validation.count(out.replace(judged=known), _NoMetrics, levels=2)
        np.testing.assert_equal(validation.summarise(sums)['eval/valid_format'], share)
        turn_mask = jnp.ones((2, 1), bool)
        result = metrics.valid_format(out.replace(judged=known), turn_mask)
        np.testing.assert_equal(float(result), share)


@pytest.mark.parametrize(
    'schedule, expected',
    [
        ('constant', [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ('linear', [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (
            'cosine',
            [
                0.5,
                1.0,
                1.0,
                0.2 + 0.4 * (1 + np.cos(np.pi / 4)),
                0.6,
                0.2 + 0.4 * (1 - np.cos(np.pi / 4)),
                0.2,
            ],
        ),
    ],
)
def test_rates_rise_in_the_warm_up_then_follow_their_schedule(schedule, expected):
    """Adam's steps along a constant gradient have the length of the learning rate."""
    steps = 0 if schedule == 'constant' else 4
    final = 0.0 if schedule == 'constant' else 0.2
    rates = dict(warmup_steps=2, schedule=schedule, schedule_steps=steps, final_lr=final)
    tx = Optim(weight_decay=0.0, **rates).tx(1.0)
    x, state, moved = jnp.zeros(()), tx.init(jnp.zeros(())), []
    for _ in expected:
        step, state = tx.update(jnp.ones(()), state, x)
        moved.append(-float(step))
    np.testing.assert_allclose(moved, expected, atol=1e-4)


def test_a_checkpoint_without_a_new_field_resumes_with_its_default():
    cfg = micro_runs.config('frozen_lake')
    older = to_metadata(cfg)
    del older['version']
    fields = older['config']
    del fields['eval']['samples'], fields['optim']['schedule'], fields['library']
    now = to_metadata(cfg)
    checkpoint.check_config(canonical_json(older), canonical_json(now))
    now['config']['optim']['schedule'] = 'linear'
    with pytest.raises(ValueError, match='optim.schedule: "constant" in the checkpoint'):
        checkpoint.check_config(canonical_json(older), canonical_json(now))
