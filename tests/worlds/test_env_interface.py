"""The environment interface: every class passes every_world's checks, with settings by name."""

import dataclasses
import functools
import subprocess
import sys

import every_world
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents
from every_world import World
from flax import struct

from agentrl_jax.envs import ENVIRONMENTS, WORLDS, FrozenLake, Library, Sokoban, simulation
from agentrl_jax.envs.base import TextEnvironment, build, environment, of_pool, read_world
from agentrl_jax.envs.reference import reference_curves
from agentrl_jax.envs.sokoban.world import OTHER_SYMBOLS
from agentrl_jax.run.config import read
from agentrl_jax.run.parts import build_environment
from agentrl_jax.settings import tree
from agentrl_jax.settings.rules import must
from agentrl_jax.text.task import build_task

DEFAULTS = {name: world() for name, world in ENVIRONMENTS.items()}
RULES = {  # they change the rules
    'sokoban 8x8': Sokoban(dim=8, num_boxes=2, search_depth=10),
    'library 9 boxes graded': Library(side=3, graded=True, lookup_cost=0.1, cards=16),
}
FORMATS = {  # they change the text, not the rules
    'lake coord': FrozenLake(observation_format='coord'),
    'lake grid_coord': FrozenLake(observation_format='grid_coord', frozen=0.6),
    'sokoban other symbols': Sokoban(symbols=OTHER_SYMBOLS, search_depth=30),
    'sokoban cells': Sokoban(observation_format='cells'),
    'sokoban coord': Sokoban(observation_format='coord'),
    'sokoban 7x7 3 boxes': Sokoban(
        dim=7, num_boxes=3, observation_format='grid_coord', search_depth=10
    ),
}


@functools.cache
def world(case):
    return World((DEFAULTS | RULES | FORMATS)[case])


def named(check):
    return check.__name__


@pytest.mark.parametrize('check', every_world.CHECKS, ids=named)
@pytest.mark.parametrize('case', DEFAULTS)
def test_every_world(case, check):
    check(world(case))


@pytest.mark.soak
@pytest.mark.parametrize('check', [*every_world.TEXTS, *every_world.RULES], ids=named)
@pytest.mark.parametrize('case', RULES)
def test_every_rule(case, check):
    check(world(case))


@pytest.mark.parametrize('case', FORMATS)
def test_every_format(case):
    every_world.lines_concatenate_to_the_observation_text(world(case))


def test_every_field_of_a_world_is_a_setting():
    """A class variable of another base would hide a field of the same name."""
    for name, world in WORLDS.items():
        assert world.name == name and world() == world()
        assert tree.hints(world).keys() == {field.name for field in dataclasses.fields(world)}


@pytest.mark.soak
def test_environments_are_gymnax_environments_without_importing_all_of_gymnax():
    """gymnax imports all its environments and seaborn, which takes longer than all of ours."""
    program = """
import sys
from agentrl_jax.envs import TextEnvironment
assert not {'gymnax', 'seaborn', 'matplotlib'} & set(sys.modules)
import gymnax
assert issubclass(TextEnvironment, gymnax.environments.environment.Environment)
assert type(gymnax.make('CartPole-v1')[0].action_space()).__module__ == 'gymnax.environments.spaces'
"""
    subprocess.run([sys.executable, '-c', program], check=True)


# ---- from a config to a world ------------------------------------------------------------------


def test_a_world_is_built_from_its_section_and_its_pool_fields():
    cfg = micro_runs.config('library', **{'library.side': 3, 'library.cards': 5})
    env, params = build_environment(read(cfg), 'validation')
    assert (env.side, env.cards) == (3, 5)
    expected = Library(side=3, cards=5).make_params('validation', num_levels=12, seed=0)
    assert (params.cards == expected.cards).all() and len(params.cards) == cfg.env.eval_levels
    assert (np.asarray(params.cards) >= 0).sum() == 5 * 12


@pytest.mark.parametrize('name', ENVIRONMENTS)
def test_only_make_params_reads_the_pool_fields(name):
    """Environments that differ in them share compilations, so traced code must not use them."""
    env = WORLDS[name]()
    drawn = [field.name for field in dataclasses.fields(env) if not field.compare]
    assert drawn == OF_POOL.get(name, drawn)
    hidden = dataclasses.replace(env, **dict.fromkeys(drawn))
    assert hidden == env and hash(hidden) == hash(env)
    every_world.lines_concatenate_to_the_observation_text(Hidden(env, hidden))


OF_POOL = {
    'frozen_lake': ['frozen', 'success_rate'],
    'sokoban': ['search_depth'],
    'bandit': [],
    'library': ['cards', 'min_hops', 'max_hops'],
    'babyai': ['levels', 'train_ids', 'test_ids'],
}


class Hidden(World):
    """An environment that sets its pool fields to None after drawing the pool."""

    def __init__(self, env, hidden):
        super().__init__(hidden)
        self.pools = lambda split: env.make_params(split, num_levels=8)


@dataclasses.dataclass(frozen=True)
class Variant(TextEnvironment):
    pairs: str = 'main'
    sizes: tuple[int, ...] = ()
    depth: int = of_pool(1)
    name = 'chosen'

    RULES = (must('pairs', 'other pairs', lambda world: world.pairs != 'none'),)

    def make_params(self, split, *, num_levels, seed):
        return split, num_levels, seed, self.depth


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(pairs='main', dept=3), r'chosen.dept; did you mean chosen.depth\?'),
        (dict(depth=3, seed=2), 'chosen.seed'),
        (dict(depth=1.5), 'chosen.depth=1.5 must be an integer'),
        (dict(depth=2**31), 'chosen.depth=2147483648 must be at most 2147483647'),
        (dict(depth=10**400), 'chosen.depth=1000'),
        (dict(pairs='none'), 'chosen.pairs'),
    ],
)
def test_errors_in_a_section_are_reported_by_name(settings, message):
    env = read_world(Variant, dict(depth=3, sizes=[1, 2]))
    assert env.sizes == (1, 2) and hash(env) == hash(Variant(sizes=(1, 2)))
    assert build(env, 'test', num_levels=2, seed=5) == (env, ('test', 2, 5, 3))
    with pytest.raises(ValueError, match=message):
        build(read_world(Variant, settings), 'train', num_levels=2, seed=0)


# ---- an environment with or without an expert, possibly with wrong rewards --------------------


@struct.dataclass
class ButtonState(environment.EnvState):
    presses: jnp.ndarray  # int32 []  in a row


@dataclasses.dataclass(frozen=True)
class Button(TextEnvironment):
    """Press a button `needed` times in a row."""

    needed: int = 1
    reward: float = 1.0
    name = 'button'
    ACTION_NAMES, REWARD_QUANTUM, REWARD_BOUNDS = ('Wait', 'Press'), 0.5, (0.0, 1.0)

    def num_levels(self, params):
        return 3

    def reset_level(self, level, params):
        return ButtonState(time=jnp.int32(0), presses=jnp.int32(0))

    def advance(self, key, state, action, params):
        after = state.replace(presses=action * (state.presses + 1))
        return after, jnp.where(self.success(after, params), self.reward, 0.0), action == 1

    def is_terminated(self, state, params):
        return self.success(state, params)

    def success(self, state, params):
        return state.presses == self.needed

    def line_ids(self, state, params):
        return state.presses[None]


class KnownButton(Button):
    def plans(self, states, used, max_actions, params):
        return [[1] * int(self.needed - presses) for presses in states.presses]


NO_POOL = environment.EnvParams(max_steps_in_episode=100)


@pytest.mark.parametrize(
    'reward, message',
    [
        (1.5, 'reward 1.5, .*BOUNDS'),
        (float('nan'), 'reward nan, .*BOUNDS'),
        (0.7, 'reward 0.7, .*QUANTUM'),
    ],
)
def test_rewards_that_cannot_be_displayed_are_rejected(reward, message):
    simulation.check_rewards(Button(), NO_POOL, 4)
    with pytest.raises(ValueError, match=f'button: .*{message}'):
        simulation.check_rewards(Button(reward=reward), NO_POOL, 4)


def test_a_wrong_reward_that_only_the_expert_earns_is_rejected():
    """Only one in a million random episodes presses twenty times in a row."""
    simulation.check_rewards(Button(20, 1.5), NO_POOL, 20)
    with pytest.raises(ValueError, match='button: .*reward 1.5'):
        simulation.check_rewards(KnownButton(20, 1.5), NO_POOL, 20)


def test_a_task_is_not_built_with_rewards_that_it_would_clip():
    """The prompt would contain 1.0 although the environment returned 1.5."""
    with pytest.raises(ValueError, match='button: .*reward 1.5'):
        build_task(Button(reward=1.5), NO_POOL, tiny_agents.tokenizer())


def test_by_default_the_oracle_is_simulated_with_its_plans():
    curves = reference_curves(KnownButton(3), NO_POOL, [0, 3, 5])
    np.testing.assert_array_equal(curves['oracle'], [0, 1, 1])
    solved = ['111' in f'{word:05b}' for word in range(32)]
    np.testing.assert_allclose(curves['random'], [0, 1 / 8, np.mean(solved)], atol=0.2)  # 60 runs


def test_without_an_expert_there_are_random_curves_and_plans_are_an_error():
    assert set(reference_curves(Button(), NO_POOL, [3])) == {'random', 'random_se'}
    with pytest.raises(ValueError, match='button has no expert.*clone.episodes=0'):
        Button().plans(None, np.zeros(1), 3, None)


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(
    'name, settings, message',
    [
        ('frozen_lake', dict(size=9), r'size=9 must be in \[2, 8\]'),
        ('frozen_lake', dict(size=5, observation_format='coord'), 'frozen_lake.size=5'),
        ('frozen_lake', dict(size=2), 'num_levels'),
        ('frozen_lake', dict(split='dev'), 'split'),
        ('sokoban', dict(symbols='##OxXPS'), 'symbols'),
        ('sokoban', dict(symbols='#_OxXPS?'), 'symbols'),
        ('sokoban', dict(dim=4), 'num_levels'),
        ('bandit', dict(split='dev'), 'split'),
        ('library', dict(tool_reward=0.25), 'tool_reward=0.25'),
        ('library', dict(split='dev'), 'split'),
        ('library', dict(cards=2, max_hops=3), 'library.max_hops=3'),
        ('library', dict(cards=1, max_hops=1, split='test'), 'num_levels'),
        ('babyai', dict(wording='agentgym'), 'babyai.actions'),
        ('babyai', dict(wording='brief'), 'babyai.wording'),
        ('babyai', dict(levels='GoToMoon'), 'GoToMoon'),
        ('babyai', dict(split='dev'), 'split'),
        ('babyai', dict(train_ids='0:9'), 'babyai.test_ids'),
        ('babyai', dict(train_ids='0:9', test_ids='8'), 'share the number 8'),
        ('babyai', dict(train_ids='0-9', test_ids='9'), 'such as 0:810'),
        ('babyai', dict(train_ids='0:9', test_ids='9'), 'train_levels'),
    ],
)
def test_impossible_settings_are_reported_by_name(name, settings, message):
    split = settings.pop('split', 'train')
    with pytest.raises(ValueError, match=message):
        build(read_world(WORLDS[name], settings), split, num_levels=5000, seed=0)
