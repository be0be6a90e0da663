"""Rollouts of several environments (env.mix), which all train one policy.

Rows are ordered by environment, with the same number per environment in every step. Environments
have their own prompts, levels and random streams, and are played one after another by the programs
of single runs. The update gets one joined rollout. Joining pads fields to the widest environment's
width; `own` cuts them back.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.text.conversation import HostTask, Task
from agentrl_jax.types import Episodes, Params, Rollout

FIRST_KEY = 2**30  # for levels of environments after the first one; above any step number


def blocks(counts: Sequence[int], rows: Any) -> Iterator[Any]:
    """Yield each environment's rows. rows: pytree of arrays [B, ...]; counts: episodes of each."""
    for count, end in zip(counts, itertools.accumulate(counts), strict=True):
        yield jax.tree.map(lambda x, a=end - count, b=end: x[a:b], rows)


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts of several environments, padded to the same width."""
    actions = max(part.actions.shape[2] for part in parts)
    measured = [part.figures for part in parts if part.figures is not None]
    figures = max((x.shape[1] for x in measured), default=0)
    doubts = any(part.judged is not None for part in parts)

    def widened(part):
        more = actions - part.actions.shape[2]
        rows = jnp.pad(part.actions, ((0, 0), (0, 0), (0, more)), constant_values=-1)
        padded = jnp.zeros((len(rows), 0)) if part.figures is None else part.figures
        padded = jnp.pad(padded, ((0, 0), (0, figures - padded.shape[1])))
        judged = jnp.ones_like(part.valid) if part.judged is None else part.judged
        return part.replace(
            actions=rows, figures=padded if measured else None, judged=judged if doubts else None
        )

    return jax.tree.map(lambda *x: jnp.concatenate(x), *map(widened, parts))


def own(task: Task, rollout: Rollout) -> Rollout:
    """Cut `figures` of one environment's rows back to the figures that it measures itself."""
    count = len(task.env.FIGURES) if isinstance(task, HostTask) else 0
    return rollout.replace(figures=rollout.figures[:, :count] if count else None)


def draw(
    key: jax.Array,
    step: jax.Array | int,
    first: jax.Array | int = 0,
    *,
    draws: Sequence[Callable],
    counts: Sequence[int],
) -> tuple[Episodes, ...]:
    """Draw the episodes of each environment, with consecutive random streams from `first` on.

    draws: one per environment. The first environment has the same levels as in a single run.
    """
    keys = [key, *(jax.random.fold_in(key, FIRST_KEY + i) for i in range(1, len(draws)))]
    begin = itertools.accumulate(counts, initial=0)
    return tuple(
        one(level_key, step, first + start)
        for one, level_key, start in zip(draws, keys, begin, strict=False)
    )


def collect(
    params: Params,
    tasks: tuple[Task, ...],
    episodes: tuple[Episodes, ...],
    key: jax.Array,
    *,
    collects: Sequence[Callable],
    join: Callable,
) -> tuple[Rollout, list[dict[str, Any]]]:
    """Return (rollout, counters of each environment). collects: one per environment."""
    # One program at a time: on CPUs, programs with collectives may wait for each other's threads.
    # In one program, independent loops may run concurrently, and wait for ever.
    results = [
        jax.block_until_ready(one(params, task, listed, key))
        for one, task, listed in zip(collects, tasks, episodes, strict=True)
    ]
    rollouts, counters = zip(*results, strict=True)
    return rollouts[0] if len(rollouts) == 1 else join(rollouts), list(counters)


def measure_worlds(
    rollout: Rollout, tasks: tuple[Task, ...], *, measure: Callable, split: Callable | None
) -> dict[str, jax.Array]:
    """Return the metrics of a rollout, and of each environment by name: rollout_sokoban/success.

    measure: (rollout, its only environment or none) -> metrics. split: splits a rollout by
    environment; None for a run of one environment, which has no metrics by name.
    """
    if split is None:
        return measure(rollout, *tasks)
    metrics = measure(rollout)
    for task, rows in zip(tasks, split(rollout), strict=True):
        world = task.env.name
        for name, value in measure(rows, task).items():
            group, _, leaf = name.partition('/')
            if group in ('rollout', 'group', 'agent'):
                metrics[f'{group}_{world}/{leaf}'] = value
            elif group == world:
                metrics[name] = value
    return metrics
