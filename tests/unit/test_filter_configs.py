"""Filters set in a config, from the rollout to the parameters after the update."""

import dataclasses
import functools

import jax
import micro_runs
import numpy as np
import optax
import pytest
import toy_rollouts as toy
import updates

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import update
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.run.config import read as read_config
from agentrl_jax.types import FrozenParams

# Four groups of four episodes; unbiased stds .5 (one of four is 1), 0, 1.5 (one is 3), 1 (one is 2)
RETURNS = np.array([1, 0, 0, 0, 2, 2, 2, 2, 3, 0, 0, 0, 2, 0, 0, 0], np.float32)
STDS = [0.5, 0.0, 1.5, 1.0]
NOTHING_FROZEN = FrozenParams(model={}, reference=None)


def rollout_of(returns=RETURNS):
    return toy.rollout_of([[(1, 2)]] * len(returns), np.asarray(returns)[:, None], length=4)


def fresh(seed=0, critic=False):
    params, tx = toy.toy_params(seed), optax.adam(0.01)
    critic_params = {'backbone': toy.toy_params(seed + 1)} if critic else None
    return updates.state(tx, params, critic_params)


def values(params, critic_params, *rows):
    return toy.toy_values(params, critic_params['backbone'], *rows)


def parts_of(algorithm, changes):
    """Build the arguments of learn for a toy model and a config."""
    run = read_config(micro_runs.config('frozen_lake', algorithm=algorithm, **changes))
    how = dataclasses.replace(UpdateSettings.of(run), optim=updates.Given(of=optax.adam(0.01)))
    value_fn = values if how.algorithm.USES_CRITIC else None
    return dict(fns=ModelFns(toy.toy_hidden, toy.toy_head, value_fn), settings=how)


def learn(rollout=None, algorithm='grpo', **changes):
    """Return (state, metrics, rows, advantages) after the update."""
    parts = parts_of(algorithm, changes)
    critic = parts['fns'].values is not None
    return jax.jit(functools.partial(update.learn, **parts))(
        fresh(critic=critic), NOTHING_FROZEN, rollout or rollout_of()
    )


def prepare(rollout=None, **changes):
    """Return (batch, trained rows of the rollout, metrics) before the update."""
    program = jax.jit(functools.partial(update.prepare, **parts_of('grpo', changes)))
    batch, rows, _, measured = jax.device_get(
        program(fresh(), NOTHING_FROZEN, rollout or rollout_of())
    )
    return batch, sorted(rows[batch.mask.any(1)].tolist()), measured


def groups(*chosen):
    return [4 * g + i for g in chosen for i in range(4)]


ALL = groups(0, 1, 2, 3)


# ---- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, selected',
    [
        ({}, ALL),
        ({'filter.keep': 0.5}, groups(2, 3)),
        # total 3: 1.5 < .8 * 3 - .01 = 2.39 <= 2.5
        ({'filter.rule': 'top_p', 'filter.p': 0.8}, groups(2, 3)),
    ],
)
def test_a_rule_trains_only_the_groups_it_selects(changes, selected):
    batch, rows, measured = prepare(**changes)
    assert rows == selected
    assert measured['filter/kept'] == pytest.approx(len(selected) / 16)
    assert batch.mask.sum() == 2 * len(selected) and not measured['filter/empty']
    by_group = {row // 4 for row in selected}
    expected = np.mean([STDS[g] for g in by_group])
    assert measured['filter/group_std_kept'] == pytest.approx(expected)
    assert measured['filter/group_std_max'] == pytest.approx(1.5)


@pytest.mark.parametrize('algorithm', ['ppo', 'grpo'])
def test_dropping_rows_and_zero_weights_give_the_same_update(algorithm):
    """Two epochs of one mini-batch of eight; with weights, the second has no trained tokens."""
    changes = {'batch.epochs': 2, 'loss.entropy_coef': 0.1}
    left_out = learn(algorithm=algorithm, **changes, **{'filter.keep': 0.5})
    # stds .5, 0, 1.5 and 1: the two largest are at least half of the largest
    min_p = {'filter.rule': 'min_p', 'filter.p': 0.5}
    weighed = learn(algorithm=algorithm, **changes, **min_p)
    assert left_out[2].shape == (8,) and weighed[2].shape == (16,)
    assert np.isfinite(weighed[3]).all(1).sum() == np.isfinite(left_out[3]).all(1).sum() == 8
    np.testing.assert_array_equal(left_out[2], weighed[2][:8])
    for a, b in zip(*map(jax.tree.leaves, (left_out[0], weighed[0])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name, value in left_out[1].items():  # empty mini-batches are excluded from means
        np.testing.assert_allclose(value, weighed[1][name], atol=1e-5, err_msg=name)


def test_scores_use_raw_returns_with_penalties_without_faulty_episodes():
    """Normalised returns cannot be ranked: every group that varies has std 1."""
    penalties = np.zeros((16, 1), np.float32)
    penalties[4] = -4.0  # 2 2 2 2 becomes -2 2 2 2: std 2
    rollout = toy.rollout_of(
        [[(1, 2)]] * 16, RETURNS[:, None], length=4, penalties=penalties, faulty=(8,)
    )  # group 2 without its 3: std 0
    assert prepare(rollout, **{'filter.keep': 0.5})[1] == groups(1, 3)


# ---- no group kept -------------------------------------------------------------------------------


@pytest.mark.parametrize('algorithm', ['grpo', 'ppo'])
def test_an_update_with_nothing_to_train_on_changes_nothing(algorithm):
    equal = rollout_of(np.ones(16))
    state, measured, rows, _ = learn(equal, algorithm, **{'filter.rule': 'varied'})
    before = fresh(critic=algorithm == 'ppo')
    assert int(state.step) == 1 and int(state.skipped) == 0
    jax.tree.map(np.testing.assert_array_equal, state.replace(step=before.step), before)
    assert measured['filter/empty'] == 1 and measured['filter/kept'] == 0
    assert np.isnan(measured['policy/loss'])  # not computed, so nan
    assert sorted(rows.tolist()) == list(range(16))
