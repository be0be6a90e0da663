"""Bandit: rewards, names, questions, splits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs.bandit import PAIRS, Bandit


@pytest.mark.parametrize('pairs', ['main', 'one_pair'])
def test_the_high_arm_pays_one_a_quarter_of_the_time_and_the_low_arm_a_tenth(pairs):
    env = Bandit(pairs=pairs)
    params = env.make_params('train')
    state = env.reset_level(0, params)
    keys = jax.random.split(jax.random.key(0), 10_000)
    for arm in (0, 1):
        step = jax.vmap(lambda k, a=arm: env.step_env(k, state, a, params))
        _, _, reward, over, info = step(keys)
        high = arm == int(state.high)
        assert np.asarray(over).all() and (np.asarray(info['success']) == high).all()
        if high:
            assert set(np.unique(reward)) == {0.0, 1.0}
            # s.e. sqrt(0.25 x 0.75 / 10000) = 0.0043; four of them
            assert abs(float(reward.mean()) - 0.25) < 0.0173
        else:
            np.testing.assert_allclose(reward, 0.1, atol=1e-7)


@pytest.mark.parametrize('pairs', ['main', 'one_pair'])
def test_every_pair_appears_in_both_orders_and_names_map_to_its_arms(pairs):
    env = Bandit(pairs=pairs)
    names = env.ACTION_NAMES
    to_action = jax.jit(env.env_action)
    for split in ('train', 'validation', 'test'):
        params, orders = env.make_params(split), set()
        for level in range(env.num_levels(params)):
            state = env.reset_level(level, params)
            arms = env.cells(state)[0]
            orders.add(tuple(arms))
            text = env.observation_text(state)
            assert f'named {arms[0]} and {arms[1]}\n' in text
            assert f'<answer> {arms[0]} </answer> or <answer> {arms[1]} </answer>.' in text
            got = [int(to_action(state, jnp.int32(i))) for i in range(len(names))]
            assert got == [arms.index(name) if name in arms else -1 for name in names]
            low, high = next(pair for pair in PAIRS[pairs][split] if set(pair) == set(arms))
            assert arms[int(state.high)] == high and arms[1 - int(state.high)] == low
        expected = PAIRS[pairs][split]
        assert orders == {*expected, *((high, low) for low, high in expected)}


def test_splits_share_no_pair_except_the_one_pair_and_main_splits_no_name():
    for pairs, splits in PAIRS.items():
        sets = [{frozenset(pair) for pair in split} for split in splits.values()]
        if pairs == 'one_pair':
            assert sets == [{frozenset({'Phoenix', 'Dragon'})}] * 3
        else:
            assert all(not a & b for a, b in itertools.combinations(sets, 2)), pairs
    names = [[name for pair in split for name in pair] for split in PAIRS['main'].values()]
    assert len(set(sum(names, []))) == sum(map(len, names))
