"""Device environments through the World interface, so that a server can step them.

An item is the index of a level in the pool of a split. All randomness derives from the item and the
action count, so a new world that gets the same actions gives the same replies. The environments are
JAX programs; a process that serves them leaves accelerators to policies.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from agentrl_jax.envs import ENVIRONMENTS, GAMES
from agentrl_jax.envs.base import TextEnvironment, build, read_world
from agentrl_jax.envs.hosts.world import Reply

UNKNOWN = 'No such action. The actions are: '


@functools.cache
def programs(env: TextEnvironment) -> tuple[Callable, Callable]:
    """Return jitted (reset_level, step_env), shared by the worlds of a process."""
    return jax.jit(env.reset_level), jax.jit(env.step_env)


class Device:
    """A device environment by name, with its settings and a pool of `levels` levels."""

    deterministic = True

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        *,
        split: str = 'train',
        levels: int = 1024,
        seed: int = 0,
    ):
        known = ENVIRONMENTS | GAMES
        if name not in known:
            raise ValueError(f'name={name!r} is not one of {", ".join(known)}')
        env = read_world(known[name], settings or {})
        self.env, self.params = build(env, split, num_levels=levels, seed=seed)
        self.instruction = self.env.instruction
        self.actions = {text: index for index, text in enumerate(self.env.ACTION_NAMES)}

    @staticmethod
    def check() -> None:
        """Select the CPU; called once in a process that serves worlds."""
        jax.config.update('jax_platforms', 'cpu')

    def reset(self, item: int) -> str:
        """Return the first observation of a level."""
        count = self.env.num_levels(self.params)
        if not 0 <= item < count:
            raise ValueError(f'item {item} is not in 0..{count - 1}')
        self.item, self.played = item, 0
        self.state = jax.device_get(programs(self.env)[0](item, self.params))
        return self.env.observation_text(self.state)

    def step(self, action: str) -> Reply:
        """Step with a named action; other text changes nothing, not even the random stream."""
        name, env = action.strip(), self.env
        if name not in self.actions:
            return Reply(f'{UNKNOWN}{", ".join(self.actions)}.', valid=False)
        key = jax.random.fold_in(jax.random.key(self.item), self.played)
        chosen = env.env_action(self.state, self.actions[name])
        after = programs(env)[1](key, self.state, chosen, self.params)
        _, self.state, reward, done, info = jax.device_get(after)
        self.played += 1
        done = bool(done or env.is_truncated(self.state, self.params))  # its step limit
        success = bool(info['success']) if done else None
        return Reply(env.observation_text(self.state), float(reward), done, success, valid=True)

    def close(self) -> None:
        self.state = None
