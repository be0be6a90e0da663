"""Gymnasium environments as host environments: an item is a seed, an answer names an action.

A text observation is used as it is. Other observations are rendered if render_mode is 'ansi', and
printed otherwise. With a Text action space the answer is the action. With Discrete it names an
action, by name or by number, counted from the space's start. Other action spaces are rejected.
"""

import contextlib
import dataclasses
import importlib.util
import json
import re
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.settings.marks import ConfigName
from agentrl_jax.settings.rules import must

ANSWER = re.compile('<answer>(.*?)</answer>', re.DOTALL)
# Action spaces without named elements. MultiBinary also has an `n`.
UNNAMED = ('Box', 'Dict', 'Graph', 'MultiBinary', 'MultiDiscrete', 'OneOf', 'Sequence', 'Tuple')
HIGHLIGHT = re.compile('\x1b\\[[0-9;]+m(.*?)\x1b\\[0m')  # marks the player in a rendered grid
UNKNOWN = 'No such action. The actions are: {names}.\n'


class GymnasiumWorld:
    """One Gymnasium environment.

    An answer without a valid action changes nothing; the next observation lists the actions.
    """

    deterministic = True  # for one seed, as Gymnasium requires

    def __init__(self, env: Any, names: tuple[str, ...] = (), instruction: str = ''):
        """names: of the numbered actions, in order; () = their numbers."""
        from gymnasium import spaces

        self.env, self.instruction = env, instruction
        space, actions = env.action_space, names
        if isinstance(space, tuple(getattr(spaces, name) for name in UNNAMED)):
            raise ValueError(
                f'action space {space} is not supported: choose an environment whose actions are '
                'Discrete or Text, or wrap it so that they are'
            )
        if isinstance(space, spaces.Discrete):
            actions = range(int(space.start), int(space.start + space.n))
            if names and len(names) != space.n:
                raise ValueError(
                    f'gymnasium.actions has {len(names)} names for {space.n} actions: name each'
                )
        self._names = names or tuple(map(str, actions))
        lowered = (name.lower() for name in self._names)
        self._actions = dict(zip(lowered, actions, strict=True))

    def reset(self, item: int) -> str:
        observation, _ = self.env.reset(seed=int(item))
        return self._text(observation)

    def step(self, action: str) -> Reply:
        # The last tagged answer, or the full text
        name = [action, *ANSWER.findall(action)][-1].strip()
        chosen = self._actions.get(name.lower()) if self._names else name
        if chosen is None:
            return Reply(UNKNOWN.format(names=', '.join(self._names)), valid=False)
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        solved = [bool(info[name]) for name in ('success', 'is_success') if name in info]
        return Reply(
            self._text(observation),
            float(reward),
            bool(terminated or truncated),
            solved[0] if solved else None,
            valid=True if self._names else None,  # unknown for free text
        )

    def close(self) -> None:
        self.env.close()

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        view = self.env.render() if self.env.render_mode == 'ansi' else observation
        return HIGHLIGHT.sub(r'[\1]', f'{view}\n')


def is_object(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(json.loads(text), dict)
    return False


@dataclasses.dataclass(frozen=True)
class Gymnasium(HostEnvironment):
    """Any environment of Gymnasium's registry with text or printable observations."""

    id: str = ''  # such as FrozenLake-v1
    keywords: str = '{}'  # of gymnasium.make, as JSON, such as {"render_mode": "ansi"}
    actions: tuple[str, ...] = ()  # names of numbered actions; () = their numbers
    instruction: Annotated[str, ConfigName('hosts.instruction')] = ''

    name = 'gymnasium'
    RULES = (
        must('id', 'an environment of Gymnasium, such as FrozenLake-v1', lambda world: world.id),
        must('keywords', 'a JSON object', lambda world: is_object(world.keywords)),
        must(
            'id',
            'an environment of Gymnasium, and pip install gymnasium',
            lambda world: importlib.util.find_spec('gymnasium'),
        ),
    )

    @property
    def forms(self) -> tuple[str, ...]:
        return self.actions

    def make(self) -> GymnasiumWorld:
        import gymnasium

        env = gymnasium.make(self.id, **json.loads(self.keywords))
        return GymnasiumWorld(env, self.actions, self.instruction)

    def item_range(self, split: str) -> np.ndarray:
        """Return the seeds of a split; splits start at 0, 10**9 and 2 * 10**9."""
        start = {'train': 0, 'validation': 10**9, 'test': 2 * 10**9}[split]
        return np.arange(start, start + 100_000)
