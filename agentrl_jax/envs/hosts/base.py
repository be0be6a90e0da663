"""The description of a host environment: its items, splits, wording and factory of worlds.

A subclass is a frozen dataclass. Its fields are the config section of its name, as for environments
on the device. World servers import its module, so it must not import JAX.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from agentrl_jax.envs.hosts.world import Player, World
from agentrl_jax.envs.splits import level_split
from agentrl_jax.settings.rules import must


class Items(NamedTuple):
    """A pool: the world's item of each level."""

    items: np.ndarray  # int32 [N]


@dataclasses.dataclass(frozen=True)
class HostEnvironment:
    """Worlds of one kind, which differ only in their items."""

    name: ClassVar[str]
    instruction: ClassVar[str] = ''  # the task in words, the same for all items
    accepted: ClassVar[str] = ''  # fixed answer to it; '' = it is part of the system message
    system: ClassVar[str] = ''  # '' = the instruction, or the default of the checkpoint's template
    ACTION_NAMES: ClassVar[tuple[str, ...]] = ()  # answers are free text
    FIGURES: ClassVar[tuple[str, ...]] = ()  # names of additional values in replies, for metrics
    SOLVED: ClassVar[float] = 1.0  # return of a solved episode, if the world reports no success
    chats: ClassVar[bool] = False  # observations are Messages; the first have the full prompt
    context: ClassVar[int] = 0  # tokens of one of several conversations; 0 = of an episode
    finishes: ClassVar[bool] = False  # an episode that is cut may still earn a reward
    plays_at_random: ClassVar[bool] = True  # the player supports random play
    quick: ClassVar[bool] = False  # the player is fast enough for the held-out items in every run

    RUN_RULES = (
        must(
            'hosts.timeout_s',
            'hosts.call_s or more',
            lambda run: (
                run.worlds[0].here
                or getattr(run.worlds[0], 'timeout_s', 0) <= run.hosts.policy.timeout_s
            ),
        ),
    )

    @property
    def forms(self) -> tuple[str, ...]:
        """Answer forms (text.forms) for rollout.constrain; () = any text."""
        return ()

    @property
    def here(self) -> bool:
        """Whether worlds live in this process."""
        return True

    def for_validation(self) -> 'HostEnvironment':
        """Return the environment that validation uses."""
        return self

    def check(self) -> None:
        """Raise an error that names any dependency that is not installed."""

    def make(self) -> World:
        """Create a world; called in the thread that will use it."""
        raise NotImplementedError

    def player(self) -> Player:
        """Create the player that plays without a policy, if there is one."""
        raise NotImplementedError

    def has_player(self) -> bool:
        return type(self).player is not HostEnvironment.player

    def item_range(self, split: str) -> range | np.ndarray:
        """Return the items of a split; splits are disjoint."""
        raise NotImplementedError

    def make_params(self, split: str = 'train', *, num_levels: int = 1024, seed: int = 0) -> Items:
        """Return up to num_levels items of a split, in an order determined by the seed."""
        known = np.asarray(self.item_range(split), np.int32)
        if not len(known):
            raise ValueError(f'{self.name} has no items in the split {split!r}')
        return Items(np.random.default_rng(seed).permutation(known)[:num_levels])

    def num_levels(self, params: Items) -> int:
        return len(params.items)

    def solved(self, returned: float) -> bool:
        """Return whether this return counts as solved, if the world reports no success."""
        return bool(returned >= self.SOLVED)

    def episode_metrics(self, actions: Any, level: Any, params: Items) -> dict[str, Any]:
        """Return environment-specific metrics, as TextEnvironment.episode_metrics does."""
        return {}


def hashed(items: Iterable[int], split: str) -> np.ndarray:
    """Return the items of a split, int32, assigned by a digest of their numbers."""
    return np.array([i for i in items if level_split(str(i).encode()) == split], np.int32)
