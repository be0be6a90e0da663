"""Custom rewards (reward.function), which replace the rewards of the environment.

On the device, the function takes a rollout and its task and is traced into the rollout program. On
hosts, it is any function of an episode's texts, called when the rollout is complete. Everything
after the rollout uses these rewards. Success and the prompts still come from the environment.

With reward.components=('format', 'outcome') the function returns a dict with these names, each a
reward of its own. Their sum is the reward. Rollout.extra[COMPONENTS] also holds each one by name.
"""

import contextlib
import dataclasses
import inspect
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.hosts.world import LARGEST
from agentrl_jax.rollout.slots import empty_rollout
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import HostTask
from agentrl_jax.types import EpisodeStop, Rollout

FIELD = 'reward.function'
OF_ROLLOUT = 'a function of (rollout, task) that returns rewards [B, K]'
OF_EPISODE = 'a function of an episode that returns a list with a number for each of its turns'
COMPONENTS = 'reward_components'  # Rollout.extra: {name: float32 [B, K]}


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of an episode on a host, as text."""

    shown: str  # the full observation before the turn
    said: str  # the policy's response, including its forced prefix
    reply: str  # the next observation; '' if the turn does not act
    reward: float  # of the environment
    acts: bool  # False: a plan or a reflection, which is not sent to the environment
    trial: int  # starts at 0


@dataclasses.dataclass(frozen=True)
class Episode:
    """A complete episode on a host, as text."""

    item: int  # of the environment
    instruction: str  # the environment's instruction for the item; '' if all items share one
    turns: tuple[Turn, ...]
    success: bool  # reported by the environment
    figures: tuple[float, ...]  # metrics reported by the environment, see its FIGURES


@dataclasses.dataclass(frozen=True)
class CustomReward:
    """A function that replaces the rewards of the environment."""

    name: str  # in messages
    function: Callable
    components: tuple[str, ...] = ()  # the names that it returns; () = it returns plain rewards

    def parts(self, returned: Any) -> dict[str, Any]:
        """Return what the function returned as {component: rewards}; ValueError if names differ.

        Plain rewards have the name ''.
        """
        if not self.components and not isinstance(returned, Mapping):
            return {'': returned}
        found = list(returned) if isinstance(returned, Mapping) else type(returned).__name__
        if set(found) != set(self.components):
            raise ValueError(
                f'{self.name} returned {found} and reward.components is {self.components}: the '
                'function must return a dict with these names, or plain rewards if it is empty'
            )
        return {name: returned[name] for name in self.components}


@contextlib.contextmanager
def blamed(what: str, function: Callable) -> Iterator[None]:
    """Turn errors of user code within a context into a ValueError with file and line."""
    try:
        yield
    except Exception as error:
        file = getattr(getattr(function, '__code__', None), 'co_filename', '')
        frames = traceback.extract_tb(error.__traceback__)
        at = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        reason = f'{type(error).__name__}: {" ".join(str(error).split())[:400]}'
        raise ValueError(f'{what} failed: {reason} ({at.filename}, line {at.lineno})') from error


def load(path: str, components: tuple[str, ...] = ()) -> CustomReward | None:
    """Import reward.function; None if the environment's rewards are used."""
    if not path:
        return None
    try:
        return CustomReward(f'{FIELD}={path!r}', import_callable(path, FIELD), components)
    except ValueError as error:
        raise ValueError(
            f"{error}; or set --config.reward.function='' to use the environment's rewards"
        ) from error


def check(reward: CustomReward | None, task: Any, *, max_tokens: int, episodes: int) -> None:
    """Raise a ValueError if reward.function does not fit this environment; compiles nothing."""
    if reward is None:
        return
    if isinstance(task, HostTask):
        try:
            inspect.signature(reward.function).bind(None)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'{reward.name} must be, for environments on hosts, {OF_EPISODE}: {error}'
            ) from error
        return
    level = jax.ShapeDtypeStruct((episodes,), np.int32)
    shapes = jax.eval_shape(lambda level: empty_rollout(task, level, max_tokens), level)
    check_traced(reward, shapes, task)


def of_rollout(
    rollout: Rollout, task: Any, reward: CustomReward
) -> tuple[Rollout, dict[str, jax.Array]]:
    """Return (the rollout with the rewards of the function of (rollout, task), counters); pure.

    Unplayed turns and faulty episodes always have reward 0. Counters: reward_faults int32 [1], the
    number of rewards that are not finite or exceed LARGEST in magnitude; reward_fault float32 [1],
    the first of them. In the rollout these are 0.
    """
    parts = reward.parts(reward.function(rollout, task))
    values = jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in parts.values()])
    turn_mask = (rollout.played & rollout.healthy[:, None])[None]
    wrong = turn_mask & ~(jnp.abs(values) <= LARGEST)  # also true for nan
    first = values.reshape(-1)[jnp.argmax(wrong.reshape(-1))]
    values = jnp.where(turn_mask & ~wrong, values, 0.0)
    faults = {'reward_faults': wrong.sum(dtype=jnp.int32)[None], 'reward_fault': first[None]}
    rollout = rollout.replace(rewards=values.sum(0))
    if reward.components:
        apart = dict(zip(parts, values, strict=True))
        rollout = rollout.replace(extra=rollout.extra | {COMPONENTS: apart})
    return rollout, faults


def check_traced(reward: CustomReward, rollout: Rollout, task: Any) -> None:
    """Raise ValueError if the function of (rollout, task) does not return rewards [B, K].

    Only shapes are evaluated.
    """
    with blamed(f'{reward.name} (on the device {OF_ROLLOUT})', reward.function):
        returned = jax.eval_shape(reward.function, rollout, task)
    shape, kinds = rollout.rewards.shape, (jnp.floating, jnp.integer, jnp.bool_)
    for name, result in reward.parts(returned).items():
        of = f' in {name!r}' if name else ''
        description = (
            f'{getattr(result, "dtype", type(result).__name__)} '
            f'{list(getattr(result, "shape", ()))}{of}'
        )
        right = isinstance(result, jax.ShapeDtypeStruct) and result.shape == shape
        if not right or not any(jnp.issubdtype(result.dtype, kind) for kind in kinds):
            raise ValueError(
                f'{reward.name} returns {description} and must return float32 {list(shape)}: a '
                'reward for each turn of each episode, as rollout.rewards'
            )


def episode_of(
    events: Iterable[Any], *, item: int, success: bool, figures: Sequence[float], trials: np.ndarray
) -> Episode:
    """Build an episode from its events: keepers.Response per reply, (part, answer) per turn.

    trials int32 [K]: trial of each turn.
    """
    turns: list[Turn] = []
    observation = instruction = ''
    for event in events:
        if isinstance(event, tuple):
            part, response = event
            trial = int(trials[len(turns)])
            turns.append(Turn(observation, response, '', 0.0, part == agents.ACT, trial))
            continue
        reply, observation = event.reply, str(event.reply.observation)
        if event.request.cut and turns:
            earned = turns[-1].reward + float(reply.reward) * reply.done
            turns[-1] = dataclasses.replace(turns[-1], reward=earned)
        elif event.request.actions:
            turns[-1] = dataclasses.replace(
                turns[-1], reply=observation, reward=float(reply.reward)
            )
        else:
            instruction = event.instruction
    return Episode(item, instruction, tuple(turns), bool(success), tuple(map(float, figures)))


def of_episode(episode: Episode, reward: CustomReward) -> dict[str, np.ndarray]:
    """Return the rewards of the function of the episode, by component; float32 [turns] each.

    ValueError if they are invalid.
    """
    with blamed(f'{reward.name}, on the episode of item {episode.item},', reward.function):
        returned = reward.function(episode)
        if isinstance(returned, Mapping):
            returned = {name: list(values) for name, values in returned.items()}
        else:
            returned = list(returned)
    parts = {}
    for name, values in reward.parts(returned).items():
        wrong = [x for x in values if not isinstance(x, numbers.Real) or not abs(x) <= LARGEST]
        if len(values) != len(episode.turns) or wrong:
            problem = f'{wrong[0]!r:.60}' if wrong else f'{len(values)} rewards'
            raise ValueError(
                f'{reward.name} returned {problem} for an episode of {len(episode.turns)} turns '
                f'(item {episode.item}): it must be {OF_EPISODE}, finite and at most {LARGEST:g}'
            )
        parts[name] = np.array([float(x) for x in values], np.float32)
    return parts


def replace(out: Rollout, events: dict[int, list], items: np.ndarray, reward: CustomReward) -> None:
    """Replace the rewards in a NumPy record by the results of a function, in place.

    events: by played row. The function is not called for faulty episodes; their rewards are 0.
    """
    apart = {name: np.zeros_like(out.rewards) for name in reward.components}
    if apart:
        out.extra[COMPONENTS] = apart
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
        if not episode.turns:  # the first prompt did not fit
            continue
        for name, values in of_episode(episode, reward).items():
            out.rewards[b, : len(values)] += values
            if name:
                apart[name][b, : len(values)] = values
