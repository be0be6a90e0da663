"""Interface of an environment: gymnax's, plus hooks that render it as text.

A subclass is a frozen dataclass of static settings, so equal environments share compilations.
It implements the methods that raise NotImplementedError, for one episode without batch axes. It
inherits reset_env, step_env and gymnax's jitted six-value step and reset. Methods that take
unbatched states and actions and return arrays are pure and traced. All other methods run on the
host, some for many levels at once.
The fields are the config section with the environment's name: types, bounds, defaults, comments.
RULES holds constraints that bounds cannot express (settings/rules.py). Fields that only select
levels are declared with of_pool: no traced method reads them, and equality ignores them.
"""

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs import simulation
from agentrl_jax.settings import rules, tree

MOST_FEATURES = 16_384  # inputs of a scout's network


def gymnax_module(name: str) -> ModuleType:
    """Import module `name` of gymnax.environments without the package.

    The package imports all its environments, including seaborn plots and device constants, which
    takes 3 seconds. A program that imports gymnax itself, before or after, gets the same classes.
    """
    full_name = f'gymnax.environments.{name}'
    if full_name not in sys.modules:
        package = importlib.util.find_spec('gymnax')
        path = Path(package.submodule_search_locations[0]) / 'environments' / f'{name}.py'
        spec = importlib.util.spec_from_file_location(full_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


environment, spaces = gymnax_module('environment'), gymnax_module('spaces')


def of_pool(default: Any) -> Any:
    """Declare a field that only selects levels; changing it does not trigger a compilation."""
    return dataclasses.field(default=default, compare=False)


class TextEnvironment(environment.Environment[Any, Any]):
    """A gymnax environment over a pool of levels; its observations are lists of known lines."""

    ACTION_NAMES: ClassVar[tuple[str, ...]]  # indexed by env_action's name_index
    REWARD_QUANTUM: ClassVar[float]  # every step reward is a multiple of it
    REWARD_BOUNDS: ClassVar[tuple[float, float]]  # of one step
    REWARDS_ROUNDED: ClassVar[bool] = False  # prompts show the nearest multiple
    name: ClassVar[str]

    @property
    def instruction(self) -> str:
        """Explanation of the task and of the symbols, for the prompt."""
        raise NotImplementedError

    def rules(self, params: Any) -> str:
        """Return the rules for a human player: the instruction, corrected for the params."""
        return self.instruction

    def make_params(self, split: str = 'train', *, num_levels: int = 1024, seed: int = 0) -> Any:
        """Return EnvParams with a pool of `num_levels` levels of `split`, determined by the seed.

        Pools of different splits never share a level.
        """
        raise NotImplementedError

    def num_levels(self, params: Any) -> int:
        """Return the size of the pool."""
        raise NotImplementedError

    def reset_level(self, level: jax.Array, params: Any) -> Any:
        """Return the initial state of a level (int32 [])."""
        raise NotImplementedError

    def advance(
        self, key: jax.Array, state: Any, action: jax.Array, params: Any
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Return (next state, reward float32 [], effective bool []) from a non-terminal state.

        step_env counts `time`.
        """
        raise NotImplementedError

    def success(self, state: Any, params: Any) -> jax.Array:
        """Return bool []: whether an episode that ends here counts as solved."""
        raise NotImplementedError

    def names_of(self, level: int, params: Any) -> Sequence[str]:
        """Return the names of env_action's actions in a level, for people."""
        return self.ACTION_NAMES

    def env_action(self, state: Any, name_index: jax.Array) -> jax.Array:
        """Return the action with name ACTION_NAMES[name_index] in this state; -1 = not on offer."""
        return jnp.asarray(name_index, jnp.int32)

    def offered(self, state: Any) -> jax.Array | None:
        """Return bool [names]: the actions that random play draws from; None = all."""
        return None

    def episode_metrics(
        self, actions: jax.Array, level: jax.Array, params: Any
    ) -> dict[str, jax.Array]:
        """Return environment-specific metrics of episodes, float32 [B] each (optional, traced).

        actions int32 [B, K, A] as executed, -1 = none; level int32 [B]. Their means are logged as
        <environment>/<name> and eval/<name>.
        """
        return {}

    def lines(self, params: Any) -> list[str]:
        """Return every possible observation line, ending in a newline, for all pools."""
        raise NotImplementedError

    def line_slots(self, params: Any) -> list[range]:
        """Return the possible ids (besides -1) at each index r of line_ids."""
        raise NotImplementedError

    def line_ids(self, state: Any, params: Any) -> jax.Array:
        """Return the observation as int32 [R] indices into lines; -1 = no line."""
        raise NotImplementedError

    def observation_text(self, state: Any) -> str:
        """Return the observation, written without line tables (host; reference for tests)."""
        raise NotImplementedError

    def cells(self, state: Any) -> list[list[str]]:
        """Return the contents of each cell in words, row by row (host; drawn in reports)."""
        raise NotImplementedError

    def for_validation(self) -> 'TextEnvironment':
        """Return the environment that validation plays."""
        return self

    def plans(
        self, states: Any, used: np.ndarray, max_actions: int, params: Any
    ) -> list[list[int]]:
        """Return the expert's plan for each of N stacked host states.

        A plan holds indices into ACTION_NAMES, at least the next action; [] = unsolvable. It may
        assume that every action has its intended effect. Plans of ended states are ignored. used
        int [N]: actions already taken, out of `max_actions`.
        """
        raise simulation.NoExpert(
            f'{self.name} has no expert. Implement {type(self).__name__}.plans, or '
            'train without demonstrations (clone.episodes=0)'
        )

    def random_success(
        self, params: Any, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
    ) -> np.ndarray:
        """Return float [budgets, levels]: success probability of random play per action budget.

        Simulated with `rollouts` episodes per level; actions are uniformly random.
        """
        horizon = int(max(budgets))
        won = simulation.simulate_random(self, params, horizon, rollouts=rollouts, seed=seed)
        return won[np.asarray(budgets)].mean(2)

    def oracle_success(self, params: Any, budgets: Sequence[int], *, seed: int = 0) -> np.ndarray:
        """Return float [budgets, levels]: success of the expert within each action budget.

        Simulated by following `plans` once; raises NoExpert without an expert.
        """
        return np.stack(
            [simulation.simulate_oracle(self, params, int(budget), seed=seed) for budget in budgets]
        ).astype(float)

    def observe(self, key: jax.Array, state: Any, action: Any, params: Any) -> jax.Array:
        """Return the observation of gymnax's step: line_ids, int32 [R]."""
        return self.line_ids(state, params)

    def observation_space(self, params: Any) -> spaces.Space:
        lines, slots = self.lines(params), self.line_slots(params)
        return spaces.Box(-1, len(lines) - 1, (len(slots),), jnp.int32)

    def features(self, state: Any, params: Any) -> jax.Array:
        """Return float32 [F], the input of a scout's network (imitation/scout.py; traced).

        By default this is `observe`: floats as they are, integers one-hot between the bounds of
        observation_space. If `observe` is inherited, it is the line at each place, one-hot.
        """
        if type(self).observe is TextEnvironment.observe:
            ids, slots = self.line_ids(state, params), self.line_slots(params)
            check_features(self, sum(map(len, slots)))
            places = [
                jax.nn.one_hot(ids[r] - slot.start, len(slot)) for r, slot in enumerate(slots)
            ]
            return jnp.concatenate(places)
        seen, space = self.observe(None, state, None, params), self.observation_space(params)
        seen = jnp.reshape(seen, -1)
        if not jnp.issubdtype(seen.dtype, jnp.integer):
            return seen.astype(jnp.float32)
        low, high = (
            (0, space.n - 1) if isinstance(space, spaces.Discrete) else (space.low, space.high)
        )
        check_features(self, seen.size * int(high - low + 1))
        return jax.nn.one_hot(seen.astype(jnp.int32) - low, int(high - low + 1)).reshape(-1)

    @property
    def default_params(self) -> Any:
        """A small training pool."""
        return self.make_params('train', num_levels=256)

    @property
    def num_actions(self) -> int:
        return len(self.ACTION_NAMES)

    def action_space(self, params: Any = None) -> spaces.Discrete:
        return spaces.Discrete(self.num_actions)

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        """Reset to a level drawn uniformly from the pool."""
        k_level, k_observe = jax.random.split(key)
        level = jax.random.randint(k_level, (), 0, self.num_levels(params))
        state = self.reset_level(level, params)
        return self.observe(k_observe, state, None, params), state

    def step_env(
        self, key: jax.Array, state: Any, action: jax.Array, params: Any
    ) -> tuple[jax.Array, Any, jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return (observation, state, reward, terminated, info); actions count from 0.

        A terminal state is absorbing, and an action outside the action space changes nothing: both
        give reward 0 and leave even `time` unchanged.
        """
        action = jnp.asarray(action, jnp.int32)
        legal = (action >= 0) & (action < self.num_actions)
        live = legal & ~self.is_terminated(state, params)
        index = jnp.clip(action, 0, self.num_actions - 1)
        after, reward, effective = self.advance(key, state, index, params)
        after = after.replace(time=state.time + 1)
        after = jax.tree.map(lambda new, old: jnp.where(live, new, old), after, state)
        reward = jnp.where(live, reward, 0.0)
        info = {'success': self.success(after, params), 'effective': live & effective}
        terminated = self.is_terminated(after, params)
        return self.observe(key, after, action, params), after, reward, terminated, info


def check_features(env: TextEnvironment, count: int) -> None:
    """Raise ValueError if a network's input would be too wide."""
    if count > MOST_FEATURES:
        raise ValueError(
            f'{env.name} has {count:,} features, more than {MOST_FEATURES:,}, so no scout can play '
            f'it. Implement {type(env).__name__}.features'
        )


def shared_fields(world: type) -> dict[str, tree.Leaf]:
    """Return {the world's name for a shared field: the field of the hosts section}."""
    shared = [x for x in tree.leaves(world, 'own.').values() if x.name.startswith('hosts.')]
    names = [(one.attribute, one.name.partition('.')[2]) for one in shared]
    return {name: one for one, both in zip(shared, names, strict=True) for name in both}


def read_world(
    world: type, settings: Mapping[str, Any], hosts: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Build a world from its section of a config or from JSON; ValueError lists all errors.

    Fields that worlds on hosts share may be in `settings` or in `hosts`, their section.
    """
    shared = {f'{world.name}.{name}': leaf.name for name, leaf in shared_fields(world).items()}
    flat = {shared.get(name, name): x for name, x in tree.flat({world.name: settings}).items()}
    known = tree.leaves(world, f'{world.name}.')
    if wrong := [name for name in flat if name not in known]:
        raise ValueError('; '.join(tree.unknown_field_message(name, known) for name in wrong))
    return tree.read(world, {'hosts': hosts, **flat}, f'{world.name}.')


def build(env: Any, split: str, *, num_levels: int, seed: int) -> tuple[Any, Any]:
    """Return (env, parameters with a pool of the split); ValueError for invalid settings."""
    if wrong := rules.broken_by(env):
        raise ValueError('; '.join(rule.sentence for rule in wrong))
    return env, env.make_params(split, num_levels=num_levels, seed=seed)


class Lines:
    """Families of lines, concatenated into one list; built once per environment."""

    def __init__(self, **families: list[str]):
        sizes = [len(family) for family in families.values()]
        starts = [0, *itertools.accumulate(sizes)]
        self.slots = {
            name: range(start, start + size)
            for name, start, size in zip(families, starts, sizes, strict=False)
        }
        self.texts = [line for family in families.values() for line in family]

    def ids(self, name: str, index: Any, present: Any = True) -> jax.Array:
        """Return the ids of lines `index` of a family, int32 [n]; -1 if not present."""
        start = self.slots[name].start
        ids = jnp.where(present, start + jnp.asarray(index, jnp.int32), -1)
        return jnp.atleast_1d(ids.astype(jnp.int32))
