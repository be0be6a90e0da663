"""What a run must know of worlds on hosts before it has one: items, splits, words, how to make one.

A subclass is a frozen dataclass whose fields are the section of its name in a config, as those of
worlds on the device. Servers of worlds import its module, and no JAX with it.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from agentrl_jax.envs.hosts.world import Player, World
from agentrl_jax.envs.splits import level_split
from agentrl_jax.settings.rules import must


class Items(NamedTuple):
    """A pool: what a level of it is called by the world."""

    items: np.ndarray  # int32 [N]


@dataclasses.dataclass(frozen=True)
class HostEnvironment:
    """Worlds of one kind, that differ in their items."""

    name: ClassVar[str]
    instruction: ClassVar[str] = ''  # what the task is, the same for all items
    accepted: ClassVar[str] = ''  # fixed answer to it; '' = it is part of the system message
    system: ClassVar[str] = ''  # '' = the instruction, or what the checkpoint's template says
    ACTION_NAMES: ClassVar[tuple[str, ...]] = ()  # answers are free text
    FIGURES: ClassVar[tuple[str, ...]] = ()  # names of what replies measure besides, for metrics
    SOLVED: ClassVar[float] = 1.0  # return of a solved episode, where the world does not say
    chats: ClassVar[bool] = False  # observations are Messages, the first ones with all that a
    # conversation begins with
    context: ClassVar[int] = 0  # tokens of one of several conversations; 0 = of an episode
    finishes: ClassVar[bool] = False  # an episode that is cut may still earn something
    plays_at_random: ClassVar[bool] = True  # the player can do without its expert
    quick: ClassVar[bool] = False  # the player can play the held-out items in every run

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
        """What answers must look like (text.forms), for rollout.constrain; () = any text."""
        return ()

    @property
    def here(self) -> bool:
        """Whether worlds are in this process."""
        return True

    def for_validation(self) -> 'HostEnvironment':
        """The same worlds as validation plays them."""
        return self

    def check(self) -> None:
        """Raises what a world needs and is not installed, by name."""

    def make(self) -> World:
        """A world; called in the thread that will use it."""
        raise NotImplementedError

    def player(self) -> Player:
        """Who plays without a policy, where there is somebody."""
        raise NotImplementedError

    def has_player(self) -> bool:
        return type(self).player is not HostEnvironment.player

    def item_range(self, split: str) -> range | np.ndarray:
        """The items of a split; those of different splits share none."""
        raise NotImplementedError

    def make_params(self, split: str = 'train', *, num_levels: int = 1024, seed: int = 0) -> Items:
        """Up to num_levels items of a split, in an order that the seed decides."""
        known = np.asarray(self.item_range(split), np.int32)
        if not len(known):
            raise ValueError(f'{self.name} has no items in the split {split!r}')
        return Items(np.random.default_rng(seed).permutation(known)[:num_levels])

    def num_levels(self, params: Items) -> int:
        return len(params.items)

    def solved(self, returned: float) -> bool:
        """Whether an episode of this return counts as solved, where the world does not say."""
        return bool(returned >= self.SOLVED)

    def episode_metrics(self, actions: Any, level: Any, params: Items) -> dict[str, Any]:
        """Figures of this environment's own, as TextEnvironment.episode_metrics."""
        del actions, level, params
        return {}


def hashed(items: range, split: str) -> np.ndarray:
    """The items of a split, by a digest of their numbers; int32."""
    return np.array([i for i in items if level_split(str(i).encode()) == split], np.int32)
