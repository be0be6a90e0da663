"""The worlds that train: a tuple, of one world or of those of env.mix, which all train one policy.

The rows of a rollout are ordered world by world, as many of each in every step. A world has its own
prompts, levels and random streams, and its rows are played by the program of a run of its own, one
world after another; what follows a rollout knows groups alone and sees one rollout. Worlds on hosts
say more or less of an episode than others: rows are made as wide as the widest, and those of one
world are cut back to its own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.text.conversation import HostTask, Task
from agentrl_jax.types import Params, Rollout

FIRST_KEY = 2**30  # levels of worlds after the first one: no step has such a number


def blocks(counts: Sequence[int], rows: Any) -> Iterator[Any]:
    """The rows of each world; rows: a pytree of arrays [B, ...], counts: episodes of each."""
    for count, end in zip(counts, itertools.accumulate(counts), strict=True):
        yield jax.tree.map(lambda x, a=end - count, b=end: x[a:b], rows)


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of several worlds, one after another; see own for what is widened."""
    actions = max(part.actions.shape[2] for part in parts)
    measured = [part.figures for part in parts if part.figures is not None]
    figures = max((x.shape[1] for x in measured), default=0)
    doubts = any(part.judged is not None for part in parts)

    def widened(part):
        more = actions - part.actions.shape[2]
        rows = jnp.pad(part.actions, ((0, 0), (0, 0), (0, more)), constant_values=-1)
        found = jnp.zeros((len(rows), 0)) if part.figures is None else part.figures
        found = jnp.pad(found, ((0, 0), (0, figures - found.shape[1])))
        judged = jnp.ones_like(part.valid) if part.judged is None else part.judged
        return part.replace(
            actions=rows, figures=found if measured else None, judged=judged if doubts else None
        )

    return jax.tree.map(lambda *x: jnp.concatenate(x), *map(widened, parts))


def own(task: Task, rollout: Rollout) -> Rollout:
    """Rows of one world of a rollout of several, with the figures that it measures itself."""
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
    """Episodes of each world; their random streams follow one another from `first` on.

    draws: draw_episodes of each world. The first world has the levels of a run of its own.
    """
    keys = [key, *(jax.random.fold_in(key, FIRST_KEY + i) for i in range(1, len(draws)))]
    begin = itertools.accumulate(counts, initial=0)
    return tuple(
        one(own, step, first + start) for one, own, start in zip(draws, keys, begin, strict=False)
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
    """(rollout, counters of each) of all worlds; collects: collect of each world, join: joined."""
    # One program at a time: two with collectives may wait for each other's threads on CPUs, and in
    # one program loops that do not depend on each other may run at once, and wait for ever.
    played = [
        jax.block_until_ready(one(params, task, listed, key))
        for one, task, listed in zip(collects, tasks, episodes, strict=True)
    ]
    rollouts, counters = zip(*played, strict=True)
    return rollouts[0] if len(rollouts) == 1 else join(rollouts), list(counters)


def measure(
    rollout: Rollout,
    tasks: tuple[Task, ...],
    *,
    split: Callable,
    one: Callable,
    together: Callable | None,
) -> dict[str, jax.Array]:
    """Metrics of a rollout, and those of each world with its name: rollout_sokoban/success.

    split: the rows of each world of a rollout; one: metrics of a world's; together: of all. Without
    together they are those of the one world, and its name is in none.
    """
    if together is None:
        return one(rollout, *tasks)
    found = together(rollout)
    for task, rows in zip(tasks, split(rollout), strict=True):
        world = task.env.name
        for name, value in one(rows, task).items():
            group, _, leaf = name.partition('/')
            if group in ('rollout', 'group', 'agent'):
                found[f'{group}_{world}/{leaf}'] = value
            elif group == world:
                found[name] = value
    return found
