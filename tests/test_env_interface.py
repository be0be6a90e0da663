"""What all environments share: gymnax's interface, absorbing ends, lines that equal the text."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs import ENVIRONMENTS, Bandit, FrozenLake, Library, Sokoban
from agentrl_jax.envs.sokoban.world import OTHER_SYMBOLS

CASES = {
    'lake': (FrozenLake(), {}),
    'lake 6x6': (FrozenLake(size=6), dict(frozen=0.7)),
    'lake 8x8': (FrozenLake(size=8), {}),
    'lake coord': (FrozenLake(observation_format='coord'), {}),
    'lake grid_coord': (FrozenLake(observation_format='grid_coord'), dict(frozen=0.6)),
    'lake 3x3 grid_coord': (FrozenLake(size=3, observation_format='grid_coord'), {}),
    'sokoban': (Sokoban(), {}),
    'sokoban other symbols': (Sokoban(symbols=OTHER_SYMBOLS), dict(search_depth=30)),
    'sokoban coord': (Sokoban(observation_format='coord'), {}),
    'sokoban grid_coord': (Sokoban(observation_format='grid_coord'), {}),
    'sokoban 8x8': (Sokoban(dim=8, num_boxes=2), dict(search_depth=10)),
    'sokoban 8x8 grid_coord': (
        Sokoban(dim=8, num_boxes=2, observation_format='grid_coord'),
        dict(search_depth=10),
    ),
    'sokoban 7x7 3 boxes': (
        Sokoban(dim=7, num_boxes=3, observation_format='grid_coord'),
        dict(search_depth=10),
    ),
    'bandit': (Bandit(), {}),
    'bandit v0423': (Bandit(pairs='v0423'), {}),
    'library': (Library(), {}),
    'library 9 boxes graded': (Library(side=3, graded=True, lookup_cost=0.1), dict(cards=16)),
}
every_case = pytest.mark.parametrize('case', CASES)
# Formats and symbols change what is shown, not what happens.
every_world = pytest.mark.parametrize(
    'case',
    ['lake', 'lake 6x6', 'sokoban', 'sokoban 8x8', 'bandit', 'library', 'library 9 boxes graded'],
)
one_of_each = pytest.mark.parametrize('case', ['lake', 'sokoban', 'bandit', 'library'])


@functools.cache
def setup(case):
    env, pool = CASES[case]
    return env, env.make_params('train', num_levels=64, seed=1, **pool)


@functools.cache
def played(case, episodes=250, steps=8):
    """States of random play from random levels, starts and ends included, on the host."""
    env, params = setup(case)
    keys = jax.random.split(jax.random.key(0), max(episodes, steps))

    def act(states, key):
        keys = jax.random.split(key, episodes)
        actions = jax.random.randint(key, (episodes,), 0, env.num_actions)
        step = jax.vmap(env.step_env, in_axes=(0, 0, 0, None))
        return step(keys, states, actions, params)[1], states

    @jax.jit
    def run():
        states = jax.vmap(env.reset_env, in_axes=(0, None))(keys[:episodes], params)[1]
        return jax.lax.scan(act, states, keys[:steps])

    last, seen = run()
    both = jax.tree.map(lambda a, b: np.concatenate([a, b[None]]), seen, last)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), both)


@every_case
def test_lines_concatenate_to_the_observation_text(case):
    env, params = setup(case)
    states = played(case)
    lines, slots = env.lines(params), env.line_slots(params)
    assert len(lines) <= 120_000
    assert all(line.endswith('\n') for line in lines)
    ids = np.asarray(jax.jit(jax.vmap(env.line_ids, in_axes=(0, None)))(states, params))
    assert ids.shape[1] == len(slots)
    for index in range(len(ids)):
        state = jax.tree.map(lambda x, i=index: x[i], states)
        assert ''.join(lines[i] for i in ids[index] if i >= 0) == env.observation_text(state)
    for place, slot in enumerate(slots):
        used = ids[:, place]
        assert ((used == -1) | ((used >= slot.start) & (used < slot.stop))).all()


@every_case
def test_lines_do_not_depend_on_the_split(case):
    env, params = setup(case)
    held_out = env.make_params('test', num_levels=8, seed=5, **CASES[case][1])
    assert env.lines(params) == env.lines(held_out)


def test_environments_are_gymnax_environments_without_importing_all_of_gymnax():
    """Its package imports every world it has, and seaborn: more seconds than all of ours."""
    program = """
import sys
from agentrl_jax.envs import TextEnvironment
assert not {'gymnax', 'seaborn', 'matplotlib'} & set(sys.modules)
import gymnax
assert issubclass(TextEnvironment, gymnax.environments.environment.Environment)
assert type(gymnax.make('CartPole-v1')[0].action_space()).__module__ == 'gymnax.environments.spaces'
"""
    subprocess.run([sys.executable, '-c', program], check=True)


@one_of_each
def test_gymnax_step_returns_six_values_and_restarts_at_the_end(case):
    env, params = setup(case)
    key = jax.random.key(3)
    keys = jax.random.split(key, 16)
    obs, states = jax.jit(jax.vmap(env.reset, in_axes=(0, None)))(keys, params)
    actions = jax.jit(jax.vmap(env.action_space(params).sample))(keys)
    step = jax.jit(jax.vmap(env.step, in_axes=(0, 0, 0, None)))
    over = jax.jit(jax.vmap(env.is_terminated, in_axes=(0, None)))
    for _ in range(6):
        obs, states, reward, terminated, truncated, info = step(keys, states, actions, params)
        # A finished episode was replaced by a fresh one.
        assert not np.asarray(over(states, params)).any()
        assert (np.asarray(states.time)[np.asarray(terminated | truncated)] == 0).all()
    assert reward.shape == (16,) and reward.dtype == jnp.float32
    assert obs.dtype == env.observe(key, jax.tree.map(lambda x: x[0], states), None, params).dtype
    assert bool(jax.vmap(env.observation_space(params).contains)(obs).all())
    assert {'success', 'effective', 'final_observation'} <= set(info)


@one_of_each
def test_the_time_limit_truncates(case):
    env, params = setup(case)
    params = params.replace(max_steps_in_episode=1)
    _, state = env.reset(jax.random.key(0), params)
    *_, truncated, _ = env.step(jax.random.key(0), state, 0, params)
    assert bool(truncated)


@one_of_each
def test_default_parameters_are_a_pool(case):
    env = CASES[case][0]
    _, state = env.reset(jax.random.key(0))
    assert env.num_levels(env.default_params) > 1 and int(state.time) == 0


@every_world
def test_terminal_states_are_absorbing(case):
    env, params = setup(case)
    states = played(case)
    over = np.asarray(jax.vmap(env.is_terminated, in_axes=(0, None))(states, params))
    assert over.any()
    ends = jax.tree.map(lambda x: jnp.asarray(x[over]), states)
    keys = jax.random.split(jax.random.key(1), int(over.sum()))
    step = jax.jit(jax.vmap(env.step_env, in_axes=(0, 0, None, None)))
    for action in range(env.num_actions):
        _, after, reward, terminated, info = step(keys, ends, action, params)
        jax.tree.map(np.testing.assert_array_equal, after, ends)
        assert (np.asarray(reward) == 0).all() and np.asarray(terminated).all()
        assert not np.asarray(info['effective']).any()


@every_world
def test_an_action_outside_the_action_space_changes_nothing(case):
    env, params = setup(case)
    state = env.reset_level(jnp.int32(0), params)
    actions = jnp.array([-1, env.num_actions, -(2**31), 2**31 - 1], jnp.int32)
    step = jax.jit(jax.vmap(env.step_env, in_axes=(None, None, 0, None)))
    _, after, reward, terminated, info = step(jax.random.key(0), state, actions, params)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.stack([y] * 4)), after, state)
    assert not np.asarray(reward).any() and not np.asarray(terminated).any()
    assert not np.asarray(info['effective']).any()


@every_world
def test_rewards_are_multiples_of_the_quantum_within_the_bounds(case):
    env, params = setup(case)
    states = jax.tree.map(jnp.asarray, played(case))
    keys = jax.random.split(jax.random.key(2), states.time.shape[0])
    low, high = env.REWARD_BOUNDS
    step = jax.jit(jax.vmap(env.step_env, in_axes=(0, 0, None, None)))
    for action in range(env.num_actions):
        reward = np.asarray(step(keys, states, action, params)[2])
        quanta = reward / env.REWARD_QUANTUM
        np.testing.assert_allclose(quanta, np.round(quanta), atol=1e-4)
        assert (reward >= low - 1e-6).all() and (reward <= high + 1e-6).all()


@every_world
def test_the_same_seed_gives_the_same_pool_and_another_seed_another(case):
    env, params = setup(case)
    again = env.make_params('train', num_levels=64, seed=1, **CASES[case][1])
    jax.tree.map(np.testing.assert_array_equal, params, again)
    other = jax.tree.leaves(env.make_params('train', num_levels=64, seed=2, **CASES[case][1]))
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), other, strict=True)]
    assert all(same) == (case == 'bandit')


def test_equal_settings_share_compilations():
    assert Sokoban(dim=8) == Sokoban(dim=8) and hash(FrozenLake()) == hash(FrozenLake())
    assert Sokoban() != Sokoban(dim=8)
    for name, env in ENVIRONMENTS.items():
        assert env.name == name == env().name


@pytest.mark.parametrize(
    'make, word',
    [
        (lambda: FrozenLake(observation_format='pixels'), 'observation_format'),
        (lambda: FrozenLake(size=9), 'size'),
        (lambda: FrozenLake(size=6, observation_format='coord'), 'size'),
        (lambda: FrozenLake().make_params('dev'), 'split'),
        (lambda: FrozenLake().make_params(frozen=1.5), 'frozen'),
        (lambda: FrozenLake().make_params(success_rate=-0.1), 'success_rate'),
        (lambda: FrozenLake(size=2).make_params(num_levels=500), 'num_levels'),
        (lambda: Sokoban(dim=12), 'dim'),
        (lambda: Sokoban(num_boxes=0), 'num_boxes'),
        (lambda: Sokoban(symbols='##OxXPS'), 'symbols'),
        (lambda: Sokoban(observation_format=''), 'observation_format'),
        (lambda: Sokoban(dim=4).make_params(num_levels=5000), 'num_levels'),
        (lambda: Bandit(pairs='none'), 'pairs'),
        (lambda: Bandit().make_params('dev'), 'split'),
        (lambda: Library(side=5), 'side'),
        (lambda: Library(tool_reward=0.25), 'tool_reward'),
        (lambda: Library(lookup_cost=-0.1), 'lookup_cost'),
        (lambda: Library().make_params('dev'), 'split'),
        (lambda: Library().make_params(cards=2, max_hops=3), 'max_hops'),
        (lambda: Library().make_params('test', cards=1, max_hops=1), 'num_levels'),
    ],
)
def test_impossible_settings_are_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()
