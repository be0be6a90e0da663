"""The task of a harness, and its reward."""

import asyncio
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl_jax.envs.hosts.harness.episode import End
from agentrl_jax.envs.hosts.world import WorldError, fits, is_truth
from agentrl_jax.settings.callables import import_callable


@dataclasses.dataclass(frozen=True)
class Task:
    """The argument of a harness callable."""

    item: int
    base_url: str  # for OpenAI's client
    api_key: str
    model: str = 'policy'

    @property
    def root_url(self) -> str:
        """The address for Anthropic's client, which adds /v1."""
        return self.base_url.removesuffix('/v1')


class Call:
    """A callable that plays an episode in this process; it cannot be stopped."""

    def __init__(self, name: str):
        self.name = name

    def play(self, task: Task) -> End:
        try:
            returned = import_callable(self.name, 'harness.run')(task)
            return End(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
        except BaseException as error:  # includes SystemExit and CancelledError: the episode waits
            return End(error=f'{type(error).__name__}: {error}')

    def stop(self) -> None:
        """Do nothing; its next request is rejected."""


def reward_of(earned: Any, error: str) -> tuple[float, bool | None]:
    """Return (reward, success) from a harness's result; raise WorldError if it is invalid.

    Valid results are a number, a bool, a pair (reward, success) and a mapping with both.
    """
    if isinstance(earned, bool | np.bool_):
        return float(earned), bool(earned)
    success = None
    if isinstance(earned, Mapping):
        earned, success = earned.get('reward'), earned.get('success')
    elif isinstance(earned, tuple | list) and len(earned) == 2:
        earned, success = earned
    if not fits(earned):
        message = error or f'the harness returned an invalid reward: {earned!r:.80}'
        raise WorldError(message)
    if not is_truth(success):
        raise WorldError(f'the harness returned success={success!r:.80}: use true or false')
    return float(earned), None if success is None else bool(success)
