"""GDPO: several rewards, each compared in its group."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.extras.gdpo.gdpo import GDPO
from agentrl_jax.rollout.rewards import COMPONENTS
from agentrl_jax.run.build import check
from agentrl_jax.run.config import effective, read
from configs import base

LAYOUT = [(1, 1), (1, 1)]  # two turns of one observation and one action token


def advantages(components, layouts, *, group_size, faulty=(), **settings):
    """Return the advantages of the turns, NaN where no turn was played; [B, K]."""
    components = {name: jnp.asarray(x, jnp.float32) for name, x in components.items()}
    total = np.asarray(sum(components.values()))
    rollout = toy.rollout_of(layouts, total, length=4, faulty=faulty)
    rollout = rollout.replace(extra={COMPONENTS: components})
    batch = toy.batch_of(GDPO(**settings), rollout, group_size, toy.scores_of(rollout))
    tokens = np.where(batch.mask, batch.advantages, np.nan)
    return tokens[:, [1, 3]]


def reference_advantages(columns, weights, group_size, eps=1e-4):
    """Return the advantages of the paper's code for episode rewards [B, n]."""
    grouped = np.asarray(columns, np.float64).reshape(-1, group_size, len(weights))
    spread = grouped.std(axis=1, ddof=1, keepdims=True) + eps
    total = ((grouped - grouped.mean(axis=1, keepdims=True)) / spread * weights).sum(-1).ravel()
    return (total - total.mean()) / (total.std(ddof=1) + eps)


def test_episode_rewards_follow_the_formula_of_the_papers_code():
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(8, 2)) * [10.0, 0.1]
    components = {
        name: np.stack([column, np.zeros(8)], 1)
        for name, column in zip(('large', 'small'), columns.T, strict=True)
    }
    result = advantages(components, [LAYOUT] * 8, group_size=4, component_weights=(('small', 0.5),))
    want = reference_advantages(columns, [1.0, 0.5], 4)
    np.testing.assert_allclose(result, np.stack([want, want], 1), rtol=2e-4)


def test_a_small_reward_counts_as_much_as_a_large_one():
    """Their sum is (10, 0.1, 0, 0): for GRPO the last three episodes are almost equal."""
    large, small = np.zeros((2, 4, 2))
    large[0, 0], small[1, 0] = 10.0, 0.1
    result = advantages({'large': large, 'small': small}, [LAYOUT] * 4, group_size=4)[:, 0]
    assert result[0] == pytest.approx(result[1], rel=1e-2) and result[1] > 0 > result[2]


def test_a_turn_component_is_compared_at_the_same_turn_by_hand():
    rewards = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 4.0]])
    layouts = [LAYOUT, LAYOUT, LAYOUT[:1], LAYOUT]
    result = advantages({'lookup': rewards}, layouts, group_size=4, turns=('lookup',))
    # turn 0: (1, 0, 0, 0), mean 1/4, std 1/2; turn 1: (0, 2, 4), mean 2, std 2
    per_turn = np.array([[1.5, -1.0], [-0.5, 0.0], [-0.5, np.nan], [-0.5, 1.0]])
    episodes = np.nanmean(per_turn, axis=1)
    centred = per_turn - episodes.mean()
    std = np.sqrt(np.nanmean(centred**2, axis=1).sum() / 3)
    np.testing.assert_allclose(result, centred / std, rtol=1e-3)


def test_extra_turns_earn_an_episode_component_but_not_a_turn_component():
    """The format is right in every turn; two of the four episodes take a second turn."""
    paid = np.array([[0.1, 0.1], [0.1, 0.1], [0.1, 0.0], [0.1, 0.0]])
    layouts = [LAYOUT, LAYOUT, LAYOUT[:1], LAYOUT[:1]]
    summed = advantages({'format': paid}, layouts, group_size=4)
    assert (summed[:2] > 0.5).all() and (summed[2:, 0] < -0.5).all()
    separate = advantages({'format': paid}, layouts, group_size=4, turns=('format',))
    np.testing.assert_array_equal(np.nan_to_num(separate), 0.0)


def test_a_faulty_episode_does_not_change_other_advantages():
    rng = np.random.default_rng(1)
    components = {'a': rng.normal(size=(4, 2)), 'b': rng.normal(size=(4, 2))}
    other = {
        name: np.where([[True], [True], [True], [False]], x, 7.0) for name, x in components.items()
    }
    one, two = (
        advantages(rewards, [LAYOUT] * 4, group_size=4, faulty=[3], turns=('b',))
        for rewards in (components, other)
    )
    np.testing.assert_array_equal(one, two)
    assert np.isnan(one[3]).all() and np.isfinite(one[:3]).all()


def test_without_a_reward_function_rewards_and_penalties_are_compared_separately():
    rewards = np.array([[0.0, 10.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    penalties = np.array([[0.0, 0.0], [-0.1, 0.0], [0.0, 0.0], [0.0, 0.0]])
    rollout = toy.rollout_of([LAYOUT] * 4, rewards, length=4, penalties=penalties)
    batch = toy.batch_of(GDPO(), rollout, 4, toy.scores_of(rollout))
    want = reference_advantages(np.stack([rewards.sum(1), penalties.sum(1)], 1), [1.0, 1.0], 4)
    np.testing.assert_allclose(batch.advantages[:, 1], want, rtol=2e-3)


@pytest.mark.parametrize(
    'changes, field',
    [
        ({'gdpo.weights': (('outcom', 1.0),)}, 'gdpo.weights'),
        ({'gdpo.turns': ('outcom',)}, 'gdpo.turns'),
        ({'reward.components': ('lookup', 'format_penalty')}, 'reward.components'),
        ({'filter.keep': 0.25}, 'filter.keep'),
        ({'loss.kl_coef': 0.1, 'loss.kl_in': 'reward'}, 'loss.kl_coef'),
    ],
)
def test_unsupported_settings_are_rejected(changes, field):
    cfg = base.get_config()
    cfg.algorithm = 'gdpo'
    cfg.reward.function, cfg.reward.components = 'test_gdpo:none', ('lookup', 'outcome')
    cfg.gdpo.turns = ('lookup', 'format_penalty')
    check(read(effective(cfg), None), 1)
    cfg.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=field):
        check(read(effective(cfg), None), 1)
