"""Host-side state of each device row, and the empty record of a host rollout."""

import collections
import dataclasses
from typing import Any

import numpy as np

from agentrl_jax.envs.hosts.world import Reply
from agentrl_jax.rollout import windows
from agentrl_jax.rollout.keepers import Response
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import HostTask
from agentrl_jax.types import EpisodeStop, Rollout

NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class Slot:
    """A row of the device, its environment, and the episode that they play."""

    number: int
    episode: int = -1  # row of the rollout; -1 = none
    turn: int = 0  # current turn
    length: int = 0  # tokens of the episode
    now: agents.Progress | None = None  # trial and kind of the turn
    actions: tuple[str, ...] = ()  # of the trial
    replies: tuple = ()
    heard: Response | None = None  # the last one with a reply
    branch: int = 0  # conversation that the cache holds
    context: int = 0  # tokens of that conversation
    cut: EpisodeStop = EpisodeStop.NONE  # why the final reward is requested; NONE: it is not
    cuts: int = 0  # number of these requests; the environment may continue with a shorter prompt
    chunks: collections.deque = dataclasses.field(default_factory=collections.deque)
    # First tokens of the cache after the common prefix
    opening: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)
    read: int = 0  # number of these tokens read so far
    followers: list = dataclasses.field(default_factory=list)  # (slot, tokens to copy)


def empty_record(task: HostTask, level: np.ndarray, max_tokens: int, words: int) -> Rollout:
    """Return a rollout of NumPy arrays to fill in place; words: W of Rollout.allowed."""
    out = Rollout.empty(
        np.array(level, np.int32),
        np.asarray(task.prefix),
        pad_id=task.pad_id,
        max_tokens=max_tokens,
        max_turns=task.max_turns,
        max_actions=1,
        words=words,
        xp=np,
    )
    figures = np.zeros((len(level), len(task.env.FIGURES)), np.float32)
    return out.replace(
        judged=np.zeros_like(out.valid),
        branch=np.zeros_like(out.part) if task.env.chats else None,
        figures=figures if task.env.FIGURES else None,
    )


def figures_of(reply: Reply, env: Any) -> tuple[float, ...]:
    """Return the figures of a reply; nan if a third-party server reports none."""
    if len(reply.figures) not in (0, len(env.FIGURES)):
        raise ValueError(
            f'{env.name}: a reply has {len(reply.figures)} figures, expected '
            f'{", ".join(env.FIGURES)}. The settings of the run and of its server differ.'
        )
    return reply.figures or (np.nan,) * len(env.FIGURES)


def branch_places(out: Rollout, episode: int, branch: int, prefix: int) -> np.ndarray:
    """Return the positions of a conversation's tokens in its episode's row, without the prefix."""
    in_branch = windows.branch_of(out.turn[[episode]], out.branch[[episode]], np)[0] == branch
    in_branch[:prefix] = False
    return np.flatnonzero(in_branch)
