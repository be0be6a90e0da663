"""Error of a critic, measured against known values; it does not change training."""

import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax import train
from agentrl_jax.extras.vine import critic_error
from agentrl_jax.measure import metrics
from agentrl_jax.records import run_log
from agentrl_jax.run.config import read as read_config

pytestmark = pytest.mark.soak


def label_errors(values, returns, usable=None):
    """Return label_error of values [B] and returns [B, 2] at turn 1 of 2."""
    values, returns = np.asarray(values, np.float32), np.asarray(returns, np.float32)
    grid = np.stack([np.full_like(values, 9.0), values], axis=1)  # no continuation starts at turn 0
    usable = np.ones(returns.shape, bool) if usable is None else np.asarray(usable)
    errors = critic_error.label_error(
        jnp.asarray(grid),
        jnp.ones(returns.shape, jnp.int32),
        jnp.asarray(returns),
        jnp.asarray(usable),
    )
    return {name: float(x) for name, x in errors.items()}


def test_labels_without_noise_by_hand():
    # errors 1, 1, 3: mean of squares 11/3; labels 4, 6, 8: variance 4; values 5, 5, 11: 12;
    # covariance (-2 x -2 + -2 x 0 + 4 x 2) / 2 = 6
    result = label_errors([5, 5, 11], [[4, 4], [6, 6], [8, 8]])
    assert result == pytest.approx({'error': (11 / 3) ** 0.5, 'spread': 2, 'corr': 6 / 48**0.5})


def test_label_noise_is_subtracted_by_hand():
    # labels 4 and 5 of noise 2 / 2 and 32 / 2; values 8 and 1: (16 + 16) / 2 - 17 / 2 = 7.5
    result = label_errors([8, 1], [[3, 5], [1, 9]])
    assert result['error'] == pytest.approx(7.5**0.5)
    assert result['spread'] == 0 and np.isnan(result['corr'])  # 0.5 - 8.5 is not a variance


@pytest.mark.parametrize('full_returns', [False, True])
def test_values_are_read_where_answers_start(full_returns):
    """Compare with loops; a faulty continuation and a faulty episode do not count."""
    plain = toy.random_rollout(2, rows=12, turns=3, faulty=(3,))
    rollout = jax.device_get(toy.forked(plain, (2, 2, 1, 1), faulty=[(0, 2)]))
    values = np.random.default_rng(1).normal(size=plain.tokens.shape).astype(np.float32)
    forks, turn = rollout.extra['continuations'].rollout, rollout.extra['continuations'].turn
    earned = rollout.turn_returns
    labels, read, noise = [], [], []
    for b in range(12):
        for k in (1, 2):
            at = [j for j in range(4) if turn[b, j] == k and forks.healthy[b, j]]
            if len(at) < 2 or not rollout.healthy[b]:
                continue
            returns = [float(forks.returns[b, j]) + full_returns * earned[b, :k].sum() for j in at]
            labels.append(np.mean(returns))
            noise.append(np.var(returns, ddof=1) / len(at))
            first = np.flatnonzero(rollout.action_mask[b] & (rollout.turn[b] == k))[0]
            read.append(float(values[b, first]))
    assert len(labels) > 4
    result = critic_error.critic_error(
        jnp.asarray(values), jax.tree.map(jnp.asarray, rollout), whole=full_returns
    )
    assert set(result) <= set(metrics.METRICS)
    expected = np.mean((np.array(read) - labels) ** 2) - np.mean(noise)
    assert float(result['value/vine_error']) == pytest.approx(max(expected, 0) ** 0.5, rel=1e-4)
    spread = np.var(labels, ddof=1) - np.mean(noise)
    assert float(result['value/vine_spread']) == pytest.approx(max(spread, 0) ** 0.5, rel=1e-4)


# ---- runs ----------------------------------------------------------------------------------------

RUN = {
    'steps': 4,
    'env.max_turns': 3,
    'rollout.max_tokens': 128,
    'loss.reward_on': 'turn',
    'loss.kl_coef': 0.0,
    'filter.keep': 1.0,
    'eval.every': 0,
    'log.rollouts_every': 0,
}


@pytest.mark.usefixtures('quick_runs')
def test_measuring_leaves_training_bit_identical_and_compiles_nothing(tmp_path):
    rows, states = {}, {}
    for every in (3, 0):
        cfg = micro_runs.config('frozen_lake', **RUN, **{'fork.value_every': every})
        assert train.train(cfg, str(tmp_path / str(every))) == 0
        rows[every] = run_log.read_metrics(tmp_path / str(every) / run_log.METRICS_FILE)
        states[every] = micro_runs.saved_state(cfg, tmp_path / str(every))
    measured_names = [[name for name in row if name.startswith('value/vine_')] for row in rows[3]]
    assert list(map(len, measured_names)) == [3, 0, 0, 3, 0]
    # No answer of the first policy is valid: each turn costs .1, and the critic returns 0. Half of
    # the turn starts have two turns left, the rest have one.
    assert rows[3][0]['value/vine_error'] == pytest.approx(((0.2**2 + 0.1**2) / 2) ** 0.5, rel=1e-4)
    assert rows[3][0]['value/vine_spread'] == pytest.approx(0.05, rel=0.03)
    assert rows[3][3]['value/vine_error'] < rows[3][0]['value/vine_error']  # it has learned
    assert all(row['perf/recompiles'] == 0 for row in rows[3])
    other_metrics = [
        {name: x for name, x in row.items() if not name.startswith('value/vine_')}
        for row in micro_runs.without_times(rows[3])
    ]
    assert other_metrics == micro_runs.without_times(rows[0])
    jax.tree.map(np.testing.assert_array_equal, states[3], states[0])


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'algorithm': 'grpo'}, 'algorithm'),
        ({'env.max_turns': 1}, 'env.max_turns'),
        (
            {'loss.reward_on': 'episode', 'loss.reward_normalization': 'mean'},
            'loss.reward_normalization',
        ),
        ({'fork.value_every': -1}, 'fork.value_every'),
    ],
)
def test_settings_that_prevent_the_measurement_are_rejected(changes, words):
    with pytest.raises(ValueError, match=words):
        read_config(micro_runs.plain('frozen_lake', **{'fork.value_every': 2} | changes))
