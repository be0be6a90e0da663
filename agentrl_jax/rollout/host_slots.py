"""What a rollout against hosts keeps for each row of the device, and its empty record."""

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
    """A row of the device, the world beside it, and the episode they play."""

    number: int
    episode: int = -1  # row of the rollout; -1 = none
    turn: int = 0  # that is being answered
    length: int = 0  # tokens of the episode
    now: agents.Progress | None = None  # where the episode is
    actions: tuple[str, ...] = ()  # of the trial
    replies: tuple = ()
    heard: Response | None = None  # the last one with a reply
    branch: int = 0  # conversation that the cache holds
    context: int = 0  # tokens of that conversation
    cut: EpisodeStop = EpisodeStop.NONE  # the world is asked what the episode has earned, or ...
    cuts: int = 0  # ... goes on with a shorter conversation: how often it was asked
    chunks: collections.deque = dataclasses.field(default_factory=collections.deque)
    # What the cache holds from its beginning on, after the common prefix, and how much was read
    opening: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)
    read: int = 0
    followers: list = dataclasses.field(default_factory=list)  # (slot, tokens) that wait for these


def empty_record(task: HostTask, level: np.ndarray, max_tokens: int, words: int) -> Rollout:
    """A rollout of NumPy arrays, which is filled in place; words: of Rollout.allowed."""
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
    """What a reply measures; nan where the server, another than ours, measures nothing."""
    if len(reply.figures) not in (0, len(env.FIGURES)):
        raise ValueError(
            f'{env.name}: a reply measures {len(reply.figures)} figures, which should be '
            f'{", ".join(env.FIGURES)}: settings of the run and of its server differ'
        )
    return reply.figures or (np.nan,) * len(env.FIGURES)


def branch_places(out: Rollout, episode: int, branch: int, prefix: int) -> np.ndarray:
    """Where the tokens of a conversation of an episode are in its row, after the common prefix."""
    own = windows.branch_of(out.turn[[episode]], out.branch[[episode]], np)[0] == branch
    own[:prefix] = False
    return np.flatnonzero(own)
