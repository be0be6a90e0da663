"""BabyAI as served by AgentGym: the device environment through the World interface.

Items are AgentGym's numbers, 40 x seed + level; texts, rewards and episode ends follow its wrapper.
The rules are JAX programs. No other served world except device.py imports JAX.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.envs.babyai import BabyAI as World
from agentrl_jax.envs.babyai import pool
from agentrl_jax.envs.babyai.world import EnvParams, device_arrays
from agentrl_jax.envs.hosts.world import Reply

WORLD = World(actions='macro', wording='agentgym', agentgym_rewards=True, most_seen=40)
ACTIONS = {name: index for index, name in enumerate(WORLD.ACTION_NAMES)}
CHECK = 'check'  # an action with this word lists the available actions
UNKNOWN = 'The action is not recognized. Please check valid actions.'
UNCHANGED = 'No change in state.'
MENU = '\nAvailable actions:'
COMPLETED = 'The task is completed.'
HEADERS = (
    'You cannot see any objects within sight.',
    'In front of you in this room, you can see several objects:',
)


@jax.jit
def first(params: EnvParams) -> tuple[Any, jax.Array]:
    """Return (state, line ids) of the only level of a pool."""
    state = WORLD.reset_level(jnp.int32(0), params)
    return state, WORLD.line_ids(state, params)


@jax.jit
def act(params: EnvParams, state: Any, action: jax.Array) -> tuple[Any, jax.Array]:
    """Return (state, line ids) after an action; there is no randomness."""
    after = WORLD.step_env(jax.random.key(0), state, action, params)[1]
    return after, WORLD.line_ids(after, params)


class BabyAI:
    """One game at a time; the worlds of a process share their compiled programs."""

    deterministic = True
    instruction = WORLD.instruction

    @staticmethod
    def check() -> None:
        """Select the CPU, to leave accelerators to policies; called once in a serving process."""
        jax.config.update('jax_platforms', 'cpu')

    def reset(self, item: int) -> str:
        """Return the goal, the visible objects and the available actions."""
        if not 0 <= item < 2**31:
            raise ValueError(f'item {item} must be at least 0 and below 2^31')
        try:
            levels = device_arrays(pool.numbered([item]))
        except ImportError as error:  # of minigrid, for levels that are not in the package
            raise ValueError(f'item {item}: {error}') from error
        self.params = EnvParams(**{name: jnp.asarray(values) for name, values in levels})
        self.state, ids = first(self.params)
        self.score, self.text = 0.0, spaced(ids)
        self._details = {'score': 0.0, 'deleted': False}
        return self.text

    def step(self, action: str) -> Reply:
        """Execute a command, ignoring case and outer blanks; an empty one changes nothing."""
        action = action.lower().strip()
        known = 'check available actions' if CHECK in action else action
        valid = f'"{known}"' in self.text.partition(MENU)[2]
        if known in ACTIONS:
            self.state, ids = act(self.params, self.state, ACTIONS[known])
            self.text = spaced(ids)
        else:
            notice = UNKNOWN if action else UNCHANGED
            self.text = notice + MENU + self.text.partition(MENU)[2]
        reward = float(self.state.reward)  # of the last executed action
        self.score += reward
        self._details = {'score': self.score}
        return Reply(self.text, reward=reward, done=bool(self.state.ended), valid=valid)

    def details(self) -> dict[str, Any]:
        """Return the additional fields of AgentGym's last reply."""
        return self._details

    def close(self) -> None:
        self.state = None


def spaced(ids: Any) -> str:
    """Join the lines of an observation with AgentGym's white space."""
    lines, text = all_lines(), ''
    for line in (lines[i].rstrip('\n') for i in jax.device_get(ids) if i >= 0):
        if line.startswith(HEADERS) and text:
            text = f'{text.rstrip()}\n'  # after the goal
        if line.startswith(MENU[1:]):
            text = f'{text.rstrip()}\n'
        before = '\n ' if line == COMPLETED else ''
        after = '  ' if line.startswith('There is a ') else '' if line == HEADERS[0] else ' '
        text = f'{text.rstrip() if before else text}{before}{line}{after}'
    return text.rstrip()


all_lines = functools.cache(WORLD.lines)
