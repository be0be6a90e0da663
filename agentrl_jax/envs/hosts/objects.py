"""Any Python object with reset and step as a host environment."""

import dataclasses
from typing import Annotated, Any

import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment, hashed
from agentrl_jax.envs.hosts.world import Reply, WorldError
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.settings.marks import MANY, ConfigName
from agentrl_jax.settings.rules import importable

MAKER = 'objects.make_object'


class ObjectWorld:
    """A world that wraps an object.

    reset(item) returns a text. step(action) returns a Reply, or a tuple (text, reward, done) or
    (text, reward, done, success) with any number types. close() is optional.
    """

    def __init__(self, thing: Any, *, deterministic: bool = True, instruction: str = ''):
        self.thing, self.deterministic, self._instruction = thing, deterministic, instruction

    @property
    def instruction(self) -> str:
        return getattr(self.thing, 'instruction', self._instruction)

    @property
    def offers(self) -> tuple[str, ...]:
        """Answer forms available now, a subset of hosts.forms; () = all."""
        return getattr(self.thing, 'offers', ())

    def reset(self, item: int) -> str:
        return self.thing.reset(item)

    def step(self, action: str) -> Reply:
        reply = self.thing.step(action)
        if isinstance(reply, Reply):
            return reply
        text, reward, done, *success = reply
        if isinstance(reward, bool | np.bool_):  # perhaps (text, done, reward)
            raise WorldError(f'reward of a step is {reward}, which is not a number')
        solved = None if not success or success[0] is None else bool(success[0])
        return Reply(text, float(reward), bool(done), solved)

    def close(self) -> None:
        close = getattr(self.thing, 'close', None)
        if close is not None:
            close()


@dataclasses.dataclass(frozen=True)
class Objects(HostEnvironment):
    """Worlds made by a callable, one per thread."""

    make_object: str = ''  # package.module:callable, called once per world
    instruction: Annotated[str, ConfigName('hosts.instruction')] = ''
    deterministic: Annotated[bool, ConfigName('hosts.deterministic')] = True
    num_items: Annotated[int, MANY, ConfigName('hosts.num_items')] = 1000

    name = 'objects'
    RULES = (importable('make_object'),)

    def make(self) -> ObjectWorld:
        thing = import_callable(self.make_object, MAKER)()
        return ObjectWorld(thing, deterministic=self.deterministic, instruction=self.instruction)

    def item_range(self, split: str) -> np.ndarray:
        return hashed(range(self.num_items), split)
