"""Checks of every environment: its class, settings, pools, rewards and plans."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs import SPLITS, TextEnvironment, simulation

LEVELS = 61  # requested; a pool may have fewer levels
BUDGET = 10
SHOWN = 16  # number of expert episodes among the played ones


class World:
    """An environment under test, a pool, and the states and rewards of some episodes."""

    def __init__(self, env):
        self.env = env

    def pools(self, split, seed=1):
        return self.env.make_params(split, num_levels=LEVELS, seed=seed)

    @functools.cached_property
    def params(self):
        return self.pools('train')

    @functools.cached_property
    def played(self):
        """(states [BUDGET + 1, N, ...], rewards [BUDGET, N]) of random and some expert play."""
        level = np.arange(120) % self.env.num_levels(self.params)
        plans = SHOWN if self.has_expert else 0
        return simulation.episodes(
            self.env, self.params, level, BUDGET, plans=plans, replan=False, seed=3
        )

    @functools.cached_property
    def has_expert(self):
        return type(self.env).plans is not TextEnvironment.plans

    @functools.cached_property
    def states(self):
        """All visited states, on the host: [M, ...]."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.played[0])

    def over(self, states):
        return np.asarray(over_each_row(self.env.is_terminated)(states, self.params))


@functools.cache
def over_each_row(method):
    """Return a method of an environment, vectorised over states or levels and jitted."""
    return jax.jit(jax.vmap(method, in_axes=(0, None)))


@functools.cache
def step_of_rows(env):
    """Return step_env, vectorised over keys, states and actions and jitted."""
    return jax.jit(jax.vmap(env.step_env, in_axes=(0, 0, 0, None)))


@functools.cache
def gymnax_programs(env):
    """Return gymnax's (reset, step), vectorised and jitted."""
    return (
        jax.jit(jax.vmap(env.reset, in_axes=(0, None))),
        jax.jit(jax.vmap(env.step, in_axes=(0, 0, 0, None))),
    )


def stepped(world, action, seed):
    """Return (after, reward, terminated, info) of an action in every visited state, on the host."""
    rows = len(world.states.time)
    keys = jax.random.split(jax.random.key(seed), rows)
    actions = np.full(rows, action, np.int32)
    return jax.device_get(step_of_rows(world.env)(keys, world.states, actions, world.params)[1:])


def levels(env, params):
    """Return the first state of every level, as bytes."""
    index = np.arange(env.num_levels(params))
    states = jax.device_get(over_each_row(env.reset_level)(index, params))
    return [b'|'.join(x[i].tobytes() for x in jax.tree.leaves(states)) for i in index]


# ---- texts -------------------------------------------------------------------------------------


def lines_concatenate_to_the_observation_text(world):
    env, params, states = world.env, world.params, world.states
    lines, slots = env.lines(params), env.line_slots(params)
    assert len(lines) <= 120_000
    closed = [all(lines[i].endswith('\n') for i in slot) for slot in slots]
    assert closed[-1] and '' not in lines
    ids = np.asarray(over_each_row(env.line_ids)(states, params))
    assert ids.shape[1] == len(slots)
    for index in range(len(ids)):
        state = jax.tree.map(lambda x, i=index: x[i], states)
        assert ''.join(lines[i] for i in ids[index] if i >= 0) == env.observation_text(state)
    for place, slot in enumerate(slots):
        used = ids[:, place]
        assert ((used == -1) | ((used >= slot.start) & (used < slot.stop))).all()


def lines_do_not_depend_on_the_split(world):
    held_out = world.pools('test', seed=5)
    assert world.env.lines(world.params) == world.env.lines(held_out)


def cells_are_rows_of_words(world):
    first, last = (jax.tree.map(lambda x, i=index: x[i], world.states) for index in (0, -1))
    for rows in (world.env.cells(first), world.env.cells(last)):
        assert rows and all(isinstance(word, str) for row in rows for word in row)


# ---- rules -------------------------------------------------------------------------------------


def equal_settings_share_compilations(world):
    again = dataclasses.replace(world.env)
    assert again is not world.env and again == world.env and hash(again) == hash(world.env)


def gymnax_step_returns_six_values_and_restarts_at_the_end(world):
    env, params = world.env, world.params
    key = jax.random.key(3)
    keys, (reset, step) = jax.random.split(key, 16), gymnax_programs(env)
    obs, states = reset(keys, params)
    actions = jax.jit(jax.vmap(env.action_space(params).sample))(keys)
    for _ in range(6):
        obs, states, reward, terminated, truncated, info = step(keys, states, actions, params)
        assert not world.over(states).any()  # a finished episode was replaced by a new one
        assert (np.asarray(states.time)[np.asarray(terminated | truncated)] == 0).all()
    assert reward.shape == (16,) and reward.dtype == jnp.float32
    state = jax.tree.map(lambda x: x[0], jax.device_get(states))
    assert obs.dtype == jax.eval_shape(env.observe, key, state, None, params).dtype
    assert jax.jit(jax.vmap(env.observation_space(params).contains))(obs).all()
    assert {'success', 'effective', 'final_observation'} <= set(info)


def the_time_limit_truncates(world):
    params = world.params.replace(max_steps_in_episode=1)
    keys, (reset, step) = jax.random.split(jax.random.key(0), 16), gymnax_programs(world.env)
    *_, truncated, _ = step(keys, reset(keys, params)[1], np.zeros(16, np.int32), params)
    assert truncated.all()


def terminal_states_are_absorbing(world):
    over = world.over(world.states)
    if not over.any() and not world.has_expert:
        pytest.skip('no episode of random play ended, and there is no expert')
    assert over.any()
    for action in range(world.env.num_actions):
        after, reward, terminated, info = stepped(world, action, seed=1)
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x[over], y[over]), after, world.states
        )
        assert (reward[over] == 0).all() and terminated[over].all()
        assert not info['effective'][over].any()


def an_action_outside_the_action_space_changes_nothing(world):
    over = world.over(world.states)
    for action in (-1, world.env.num_actions, -(2**31), 2**31 - 1):
        after, reward, terminated, info = stepped(world, action, seed=0)
        jax.tree.map(np.testing.assert_array_equal, after, world.states)
        assert not reward.any() and not info['effective'].any()
        np.testing.assert_array_equal(terminated, over)


def names_stand_for_actions_of_the_action_space(world):
    env, names = world.env, world.env.ACTION_NAMES
    assert len(set(names)) == len(names) > 1
    state = env.reset_level(jnp.int32(0), world.params)
    actions = np.array([env.env_action(state, jnp.int32(i)) for i in range(len(names))])
    assert ((actions >= -1) & (actions < env.num_actions)).all()
    assert (actions >= 0).any()


def rewards_are_multiples_of_the_quantum_within_the_bounds(world):
    """Check every action in every visited state."""
    env, params = world.env, world.params
    low, high = env.REWARD_BOUNDS
    for action in range(env.num_actions):
        reward = stepped(world, action, seed=2)[1]
        quanta = reward / env.REWARD_QUANTUM
        if not env.REWARDS_ROUNDED:
            np.testing.assert_allclose(quanta, np.round(quanta), atol=1e-4)
        assert (reward >= low - 1e-6).all() and (reward <= high + 1e-6).all()
    simulation.check_rewards(env, params, BUDGET)


# ---- pools -------------------------------------------------------------------------------------


def default_parameters_are_a_pool(world):
    env = world.env
    _, state = jax.jit(env.reset)(jax.random.key(0))
    assert env.num_levels(env.default_params) > 1 and int(state.time) == 0


def the_same_seed_gives_the_same_pool_and_another_seed_another(world):
    env, params = world.env, world.params
    jax.tree.map(np.testing.assert_array_equal, params, world.pools('train'))
    other = levels(env, world.pools('train', seed=2))
    drawn = env.num_levels(params) == LEVELS  # otherwise these are all levels
    assert (levels(env, params) == other) != drawn


def splits_share_no_level(world):
    by_split = {
        split: {level for seed in (1, 2) for level in levels(world.env, world.pools(split, seed))}
        for split in SPLITS
    }
    assert all(by_split.values())
    assert len(set.union(*by_split.values())) == sum(map(len, by_split.values()))


# ---- references --------------------------------------------------------------------------------


def random_play_succeeds_as_often_as_stated(world):
    """Check computed, not simulated, values to within four standard errors."""
    env, params = world.env, world.params
    if type(env).random_success is TextEnvironment.random_success:
        pytest.skip('it is simulated')
    (stated,) = env.random_success(params, [BUDGET])
    won = simulation.simulate_random(env, params, BUDGET, rollouts=20, seed=1)[BUDGET]
    error = np.sqrt((stated * (1 - stated)).mean() / won.size)
    assert len(stated) == len(won) and abs(won.mean() - stated.mean()) <= 4 * error


def the_oracle_solves_levels_as_often_as_stated(world):
    """Check level by level if the environment is deterministic, else to four standard errors."""
    if not world.has_expert:
        pytest.skip('no expert')
    env, params = world.env, world.params
    level = np.arange(min(48, env.num_levels(params)))
    states, _ = simulation.episodes(env, params, level, BUDGET, plans=len(level), seed=4)
    last = jax.tree.map(lambda x: x[-1], states)
    solved = np.asarray(over_each_row(env.success)(last, params))
    (stated,) = env.oracle_success(params, [BUDGET])
    certain = np.isin(stated[level], (0.0, 1.0))
    np.testing.assert_array_equal(solved[certain], stated[level][certain].astype(bool))
    error = np.sqrt((stated[level] * (1 - stated[level])).mean() / len(level))
    assert abs(solved.mean() - stated[level].mean()) <= 4 * error + 1e-6
    assert solved.any() and stated.mean() > env.random_success(params, [BUDGET])[0].mean()


def no_array_of_a_pool_or_state_is_empty(world):
    """jaxlib 0.11.2 crashes when it compiles a shard_map with an empty input."""
    assert min(map(np.size, jax.tree.leaves((world.params, world.states)))) > 0


TEXTS = (
    lines_concatenate_to_the_observation_text,
    lines_do_not_depend_on_the_split,
    cells_are_rows_of_words,
)
RULES = (
    terminal_states_are_absorbing,
    rewards_are_multiples_of_the_quantum_within_the_bounds,
    the_same_seed_gives_the_same_pool_and_another_seed_another,
    splits_share_no_level,
    random_play_succeeds_as_often_as_stated,
    the_oracle_solves_levels_as_often_as_stated,
)
CHECKS = (
    *TEXTS,
    *RULES,
    equal_settings_share_compilations,
    gymnax_step_returns_six_values_and_restarts_at_the_end,
    the_time_limit_truncates,
    an_action_outside_the_action_space_changes_nothing,
    names_stand_for_actions_of_the_action_space,
    default_parameters_are_a_pool,
    no_array_of_a_pool_or_state_is_empty,
)
