"""Rewards of one's own over any world (reward.function), in the place of those that it pays.

On the device it is a traceable function of a rollout and its task, part of the program that plays;
on hosts any function of an episode's texts, called when the rollout is over. Whatever follows a
rollout sees these rewards alone; success stays the world's, and so does what prompts say.
"""

import contextlib
import dataclasses
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.hosts.world import LARGEST
from agentrl_jax.text import agents
from agentrl_jax.types import EpisodeStop, Rollout

OF_ROLLOUT = 'a function of (rollout, task) that returns rewards [B, K]'
OF_EPISODE = 'a function of an episode that returns a list with a number for each of its turns'


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of an episode on a host, as texts."""

    shown: str  # what the world said before it, whole
    said: str  # what the policy wrote, its forced opening included
    reply: str  # what the world said to it; '' of a turn that does not act
    reward: float  # what the world paid for it
    acts: bool  # False: a plan or a reflection, which the world does not hear
    trial: int  # from 0 on


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode on a host that is over, as texts."""

    item: int  # of the world
    instruction: str  # what the world says of the item, '' where it is the same for all
    turns: tuple[Turn, ...]
    success: bool  # by the world
    figures: tuple[float, ...]  # that the world measured, see its environment's FIGURES


@contextlib.contextmanager
def blamed(what: str, function: Callable) -> Iterator[None]:
    """A context for foreign code: an error becomes a ValueError with its place in the code."""
    try:
        yield
    except Exception as error:
        file = getattr(getattr(function, '__code__', None), 'co_filename', '')
        frames = traceback.extract_tb(error.__traceback__)
        at = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        reason = f'{type(error).__name__}: {" ".join(str(error).split())[:400]}'
        raise ValueError(f'{what} failed: {reason} ({at.filename}, line {at.lineno})') from error


def of_rollout(
    rollout: Rollout, task: Any, function: Callable[[Rollout, Any], jax.Array]
) -> tuple[Rollout, dict[str, jax.Array]]:
    """(the rollout with the rewards of function(rollout, task), counters); pure.

    Turns that were not played, and faulty episodes, have reward 0 whatever the function says.
    Counters: reward_faults int32 [1], rewards that are not finite or above LARGEST; reward_fault
    float32 [1], the first of them. Those are 0 in the rollout.
    """
    given = jnp.asarray(function(rollout, task)).astype(jnp.float32)
    turns = jnp.arange(rollout.rewards.shape[1])[None]
    played = (turns < rollout.num_turns[:, None]) & rollout.healthy[:, None]
    wrong = played & ~(jnp.abs(given) <= LARGEST)  # nan is in no order
    first = given.reshape(-1)[jnp.argmax(wrong.reshape(-1))]
    rewards = jnp.where(played & ~wrong, given, 0.0)
    faults = {'reward_faults': wrong.sum(dtype=jnp.int32)[None], 'reward_fault': first[None]}
    return rollout.replace(rewards=rewards), faults


def check_traced(function: Callable, rollout: Rollout, task: Any, *, name: str) -> None:
    """ValueError where function(rollout, task) gives no rewards [B, K]; shapes are enough.

    name: what an error calls it.
    """
    with blamed(f'{name} (on the device {OF_ROLLOUT})', function):
        made = jax.eval_shape(function, rollout, task)
    shape, kinds = rollout.rewards.shape, (jnp.floating, jnp.integer, jnp.bool_)
    found = f'{getattr(made, "dtype", type(made).__name__)} {list(getattr(made, "shape", ()))}'
    right = isinstance(made, jax.ShapeDtypeStruct) and made.shape == shape
    if not right or not any(jnp.issubdtype(made.dtype, kind) for kind in kinds):
        raise ValueError(
            f'{name} returns {found} and must return float32 {list(shape)}: a reward for each turn '
            'of each episode, as rollout.rewards'
        )


def episode_of(
    events: Iterable[Any], *, item: int, success: bool, figures: Sequence[float], trials: np.ndarray
) -> Episode:
    """An episode from its events: keepers.Response of replies, and (part, answer) of turns.

    trials int32 [K]: of its turns.
    """
    turns: list[Turn] = []
    shown = instruction = ''
    for event in events:
        if isinstance(event, tuple):
            part, said = event
            trial = int(trials[len(turns)])
            turns.append(Turn(shown, said, '', 0.0, part == agents.ACT, trial))
            continue
        reply, shown = event.reply, str(event.reply.observation)
        if event.request.cut and turns:
            earned = turns[-1].reward + float(reply.reward) * reply.done
            turns[-1] = dataclasses.replace(turns[-1], reward=earned)
        elif event.request.actions:
            turns[-1] = dataclasses.replace(turns[-1], reply=shown, reward=float(reply.reward))
        else:
            instruction = event.instruction
    return Episode(item, instruction, tuple(turns), bool(success), tuple(map(float, figures)))


def of_episode(episode: Episode, function: Callable, *, name: str) -> np.ndarray:
    """float32 [turns]: what function(episode) gives; a ValueError says what is wrong with it."""
    with blamed(f'{name}, on the episode of item {episode.item},', function):
        given = list(function(episode))
    wrong = [x for x in given if not isinstance(x, numbers.Real) or not abs(x) <= LARGEST]
    if len(given) != len(episode.turns) or wrong:
        said = f'{wrong[0]!r:.60}' if wrong else f'{len(given)} rewards'
        raise ValueError(
            f'{name} gave {said} for an episode of {len(episode.turns)} turns (item '
            f'{episode.item}): it must be {OF_EPISODE}, finite and at most {LARGEST:g}'
        )
    return np.array([float(x) for x in given], np.float32)


def replace(
    out: Rollout,
    events: dict[int, list],
    items: np.ndarray,
    function: Callable,
    *,
    name: str,
) -> None:
    """Puts the rewards of a function into a record of episodes of NumPy arrays, in its place.

    events: of each row that was played. Faulty episodes have rewards of 0 and are not shown to it.
    """
    for b, listed in events.items():
        out.rewards[b] = 0.0
        if out.episode_stop[b] == EpisodeStop.ENV_ERROR:
            continue
        episode = episode_of(
            listed,
            item=int(items[out.level[b]]),
            success=out.success[b],
            figures=out.figures[b] if out.figures is not None else (),
            trials=out.trial[b],
        )
        if not episode.turns:  # not even the first prompt fitted
            continue
        rewards = of_episode(episode, function, name=name)
        out.rewards[b, : len(rewards)] = rewards
