"""Several worlds in one run (env.mix): each plays its share of the groups, all train one policy.

The rows of a rollout stand world by world, as many of each in every step. A world has its own
prompts, levels and random streams, and its rows are played by the program of a run of its own, one
world after another; what follows a rollout knows groups alone and sees one rollout. Worlds on hosts
say more or less of an episode than others: rows are made as wide as the widest, and those of one
world are cut back to its own.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.run.config import Config
from agentrl_jax.text.conversation import HostTask
from agentrl_jax.text.task import TextTask
from agentrl_jax.types import Params, Rollout

FIRST_KEY = 2**30  # levels of worlds behind the first one: no step has such a number


@struct.dataclass
class Mixture:
    """The worlds of a run as text."""

    tasks: tuple[TextTask | HostTask, ...]
    turn_limit: jax.Array  # int32 []  of all of them; see TextTask
    rows: tuple[int, ...] = struct.field(pytree_node=False)  # episodes of each in a rollout


def mixture(cfg: Config, tasks: Sequence[TextTask | HostTask]) -> Mixture:
    """The tasks of cfg.members as one."""
    rows = tuple(member.rollout.episodes for member in cfg.members)
    return Mixture(tasks=tuple(tasks), turn_limit=tasks[0].turn_limit, rows=rows)


def blocks(task: Mixture, rows: Any) -> Iterator[tuple[TextTask | HostTask, Any]]:
    """(task, its rows) of each world; rows: a pytree of arrays [B, ...]."""
    ends = itertools.accumulate(task.rows)
    for one, count, end in zip(task.tasks, task.rows, ends, strict=True):
        yield one, jax.tree.map(lambda x, a=end - count, b=end: x[a:b], rows)


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of several worlds, one behind another; see own for what is widened."""
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


def own(task: TextTask | HostTask, rollout: Rollout) -> Rollout:
    """Rows of one world of a rollout of several, with the figures that it measures itself."""
    count = len(task.env.FIGURES) if isinstance(task, HostTask) else 0
    return rollout.replace(figures=rollout.figures[:, :count] if count else None)


def draw(
    key: jax.Array,
    step: jax.Array,
    first: jax.Array | int = 0,
    *,
    draws: Sequence[Callable],
    rows: Sequence[int],
) -> tuple[Episodes, ...]:
    """Episodes of each world; their random streams follow one another from `first` on.

    draws: draw_episodes of each world. The first world has the levels of a run of its own.
    """
    keys = [key, *(jax.random.fold_in(key, FIRST_KEY + i) for i in range(1, len(draws)))]
    begin = itertools.accumulate(rows, initial=0)
    return tuple(
        one(own, step, first + start) for one, own, start in zip(draws, keys, begin, strict=False)
    )


def collect(
    params: Params,
    task: Mixture,
    episodes: tuple[Episodes, ...],
    key: jax.Array,
    *,
    collects: Sequence[Callable],
    join: Callable,
) -> tuple[Rollout, list[dict[str, Any]]]:
    """(rollout, counters of each) of all worlds; collects: collect of each world, join: joined."""
    played = []
    for one, member, listed in zip(collects, task.tasks, episodes, strict=True):
        found = one(params, member.replace(turn_limit=task.turn_limit), listed, key)
        # One program at a time: on CPUs two with collectives may wait for each other's threads
        played.append(jax.block_until_ready(found))
    rollouts, counters = zip(*played, strict=True)
    return join(rollouts), list(counters)


def measure(
    rollout: Rollout, task: Mixture, *, split: Callable, one: Callable, together: Callable
) -> dict[str, jax.Array]:
    """Metrics of a rollout, and those of each world behind its name: rollout_sokoban/success.

    split: the rows of each world of a rollout; one: metrics of a world's; together: of all.
    """
    found = together(rollout)
    for member, rows in zip(task.tasks, split(rollout), strict=True):
        world = member.env.name
        for name, value in one(rows, member).items():
            group, _, leaf = name.partition('/')
            if group in ('rollout', 'group', 'agent'):
                found[f'{group}_{world}/{leaf}'] = value
            elif group == world:
                found[name] = value
    return found


def programs(
    task: Mixture,
    each: Sequence[tuple],
    *,
    one: Callable,
    together: Callable,
    rows: Any,
    whole: Any,
) -> tuple[Callable, Callable, Callable]:
    """(draw, collect, metrics) of the mixture.

    each: draw and collect of every world; one, together: metrics of a world's rollout and of all;
    rows, whole: layouts on the mesh. The worlds' programs stay apart: in one program, loops that do
    not depend on each other may run at once, and their collectives wait for each other for ever.
    """
    draws, collects = zip(*each, strict=True)

    def split(rollout):
        return tuple(own(*block) for block in blocks(task, rollout))

    return (
        jax.jit(functools.partial(draw, draws=draws, rows=task.rows), out_shardings=rows),
        functools.partial(collect, collects=collects, join=jax.jit(joined, out_shardings=rows)),
        functools.partial(
            measure,
            split=jax.jit(split, out_shardings=rows),
            one=jax.jit(one, out_shardings=whole),
            together=jax.jit(together, out_shardings=whole),
        ),
    )
