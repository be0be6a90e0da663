"""What an environment must offer: gymnax's interface, and hooks that show it as text.

A subclass is a frozen dataclass of static settings, so that equal environments share compilations.
It implements the methods that raise NotImplementedError, for one episode without batch axes, and
gets reset_env, step_env and gymnax's jitted six-value step and reset from here. Methods on states
and actions without a batch axis, which return arrays, are pure and traced; the others run on the
host, some for many levels at once.
Its fields are the section of its name in a config, with types, bounds, defaults and comments; what
bounds cannot say is in RULES (settings/rules.py). Those that say which levels are drawn are
of_pool: no traced method reads them, and worlds that differ in them alone are equal.
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


def gymnax_module(name: str) -> ModuleType:
    """Module `name` of gymnax.environments, without the package, which imports every world it has.

    Those plot with seaborn and compute constants on the device, 3 seconds in all. A program that
    imports gymnax itself, before or after, finds the same classes.
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
    """A field that says which levels are drawn: other values of it compile nothing anew."""
    return dataclasses.field(default=default, compare=False)


class TextEnvironment(environment.Environment[Any, Any]):
    """A gymnax environment over a pool of levels whose observations are lists of known lines."""

    ACTION_NAMES: ClassVar[tuple[str, ...]]  # index = what env_action takes
    REWARD_QUANTUM: ClassVar[float]  # every step reward is a multiple of it
    REWARD_BOUNDS: ClassVar[tuple[float, float]]  # of one step
    REWARDS_ROUNDED: ClassVar[bool] = False  # prompts show the nearest multiple
    name: ClassVar[str]

    @property
    def instruction(self) -> str:
        """What the task is and what the symbols mean."""
        raise NotImplementedError

    def rules(self, params: Any) -> str:
        """What a person who plays reads: the instruction, as far as it is true of the params."""
        return self.instruction

    def make_params(self, split: str = 'train', *, num_levels: int = 1024, seed: int = 0) -> Any:
        """EnvParams holding a pool of `num_levels` levels of `split`, the same for the same seed.

        Pools of different splits never share a level.
        """
        raise NotImplementedError

    def num_levels(self, params: Any) -> int:
        """Size of the pool."""
        raise NotImplementedError

    def reset_level(self, level: jax.Array, params: Any) -> Any:
        """First state of the given level (int32 [])."""
        raise NotImplementedError

    def advance(
        self, key: jax.Array, state: Any, action: jax.Array, params: Any
    ) -> tuple[Any, jax.Array, jax.Array]:
        """(next state, reward float32 [], effective bool []) from a state that is not terminal.

        `time` is counted by step_env.
        """
        raise NotImplementedError

    def success(self, state: Any, params: Any) -> jax.Array:
        """bool []: the episode would count as solved if it ended here."""
        raise NotImplementedError

    def names_of(self, level: int, params: Any) -> Sequence[str]:
        """Names of the actions that env_action gives in a level, for people."""
        del level, params
        return self.ACTION_NAMES

    def env_action(self, state: Any, name_index: jax.Array) -> jax.Array:
        """Action that ACTION_NAMES[name_index] stands for in this state; -1 = not on offer."""
        del state
        return jnp.asarray(name_index, jnp.int32)

    def offered(self, state: Any) -> jax.Array | None:
        """bool [names]: actions that random play draws from; None = all of them."""
        del state
        return None

    def episode_metrics(
        self, actions: jax.Array, level: jax.Array, params: Any
    ) -> dict[str, jax.Array]:
        """Figures of this environment's own, float32 [B] each, of episodes (optional, traced).

        actions int32 [B, K, A] as executed, -1 = none; level int32 [B]. Their means are logged as
        <environment>/<name> and eval/<name>.
        """
        del actions, level, params
        return {}

    def lines(self, params: Any) -> list[str]:
        """Every line an observation can hold, each ending in a newline; not bound to one pool."""
        raise NotImplementedError

    def line_slots(self, params: Any) -> list[range]:
        """For each place r of line_ids: the ids that it may hold (besides -1)."""
        raise NotImplementedError

    def line_ids(self, state: Any, params: Any) -> jax.Array:
        """int32 [R]: the observation as indices into lines; -1 = no line at this place."""
        raise NotImplementedError

    def observation_text(self, state: Any) -> str:
        """The observation, written without line tables (host; what tests compare with)."""
        raise NotImplementedError

    def cells(self, state: Any) -> list[list[str]]:
        """What is where, row by row, in words (host; for pages that draw the world)."""
        raise NotImplementedError

    def for_validation(self) -> 'TextEnvironment':
        """The same world as validation plays it."""
        return self

    def plans(
        self, states: Any, used: np.ndarray, max_actions: int, params: Any
    ) -> list[list[int]]:
        """For each of N host states (stacked) what the best player would announce from there.

        Indices into ACTION_NAMES, at least the next one; [] = no way out. A plan may assume that
        every action does what it should; that of an ended state is not used. used int [N]: actions
        spent of `max_actions`.
        """
        raise simulation.NoExpert(
            f'{self.name} has no expert to demonstrate it: give {type(self).__name__} a method '
            'plans, or train without own demonstrations (clone.episodes=0)'
        )

    def random_success(
        self, params: Any, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
    ) -> np.ndarray:
        """float [budgets, levels]: chance of uniformly random play within each budget of actions.

        Simulated, `rollouts` times a level.
        """
        horizon = int(max(budgets))
        won = simulation.simulate_random(self, params, horizon, rollouts=rollouts, seed=seed)
        return won[np.asarray(budgets)].mean(2)

    def oracle_success(self, params: Any, budgets: Sequence[int], *, seed: int = 0) -> np.ndarray:
        """float [budgets, levels]: chance of the best player within each budget of actions.

        Simulated by following `plans` once; NoExpert where there are none.
        """
        return np.stack(
            [simulation.simulate_oracle(self, params, int(budget), seed=seed) for budget in budgets]
        ).astype(float)

    def observe(self, key: jax.Array, state: Any, action: Any, params: Any) -> jax.Array:
        """What gymnax's step returns: line_ids, int32 [R]."""
        return self.line_ids(state, params)

    def observation_space(self, params: Any) -> spaces.Space:
        lines, slots = self.lines(params), self.line_slots(params)
        return spaces.Box(-1, len(lines) - 1, (len(slots),), jnp.int32)

    @property
    def default_params(self) -> Any:
        """A small training pool."""
        return self.make_params('train', num_levels=256)

    @property
    def num_actions(self) -> int:
        return len(self.ACTION_NAMES)

    def action_space(self, params: Any = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(self.num_actions)

    def reset_env(self, key: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        """A level of the pool, drawn uniformly."""
        k_level, k_observe = jax.random.split(key)
        level = jax.random.randint(k_level, (), 0, self.num_levels(params))
        state = self.reset_level(level, params)
        return self.observe(k_observe, state, None, params), state

    def step_env(
        self, key: jax.Array, state: Any, action: jax.Array, params: Any
    ) -> tuple[jax.Array, Any, jax.Array, jax.Array, dict[str, jax.Array]]:
        """(observation, state, reward, terminated, info); the action counts from 0.

        A terminal state is absorbing, and an action outside the action space changes nothing: both
        give reward 0 and leave even `time` as it is.
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


def shared_fields(world: type) -> dict[str, tree.Leaf]:
    """{name as a field of the world's own: field of the hosts section that it is}."""
    shared = [x for x in tree.leaves(world, 'own.').values() if x.name.startswith('hosts.')]
    names = [(one.attribute, one.name.partition('.')[2]) for one in shared]
    return {name: one for one, both in zip(shared, names, strict=True) for name in both}


def read_world(
    world: type, settings: Mapping[str, Any], hosts: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The world of a section of a config, or of JSON; ValueError with everything that is wrong.

    Fields that worlds on hosts share may be among the settings, or in hosts, their section.
    """
    shared = {f'{world.name}.{name}': leaf.name for name, leaf in shared_fields(world).items()}
    flat = {shared.get(name, name): x for name, x in tree.flat({world.name: settings}).items()}
    known = tree.leaves(world, f'{world.name}.')
    if wrong := [name for name in flat if name not in known]:
        raise ValueError('; '.join(tree.no_field(name, known) for name in wrong))
    return tree.read(world, {'hosts': hosts, **flat}, f'{world.name}.')


def build(env: Any, split: str, *, num_levels: int, seed: int) -> tuple[Any, Any]:
    """(env, its parameters with a pool of the split); ValueError where it cannot be played."""
    if wrong := rules.broken_by(env):
        raise ValueError('; '.join(rule.sentence for rule in wrong))
    return env, env.make_params(split, num_levels=num_levels, seed=seed)


class Lines:
    """Families of lines laid out one after another in one list; built once per environment."""

    def __init__(self, **families: list[str]):
        sizes = [len(family) for family in families.values()]
        starts = [0, *itertools.accumulate(sizes)]
        self.slots = {
            name: range(start, start + size)
            for name, start, size in zip(families, starts, sizes, strict=False)
        }
        self.texts = [line for family in families.values() for line in family]

    def ids(self, name: str, index: Any, present: Any = True) -> jax.Array:
        """Ids of the lines `index` of a family, as int32 [n]; -1 where not present."""
        start = self.slots[name].start
        ids = jnp.where(present, start + jnp.asarray(index, jnp.int32), -1)
        return jnp.atleast_1d(ids.astype(jnp.int32))
