"""Dynamic sampling (DAPO, arXiv:2503.14476): play until the batch is full of kept groups.

It buffers the groups that the filter keeps and plays further levels, until the buffer holds an
update's groups or filter.refill further rollouts are played.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.run.run import Run
from agentrl_jax.types import Episodes, EpisodeStop, Rollout

Played = tuple[Rollout, tuple[Episodes, ...]]


def fill(
    run: Run, played: Played, play: Callable[[int], tuple[Played, list]]
) -> tuple[Played, list[dict[str, Any]], int, dict[str, float]]:
    """Return (batch, counters of further rollouts, groups held, metrics); held groups come first.

    played: the first rollout. play: plays a further one, given its number.
    """
    groups, held, count, total_passing, counted = run.config.rollout.num_groups, played, 0, 0, []
    for number in range(1 + run.config.algorithm.filter.refill):
        if number:
            played, counters = play(number)
            counted += counters
        # The count passes through the host: on devices, two layouts would compile two programs.
        held, filled, passing = run.training.pack(held, np.int32(count), played)
        count, total_passing = int(filled), total_passing + int(passing)
        if count == groups:
            break
    kept = total_passing / (groups * (number + 1))
    return held, counted, count, {'filter/collects': number + 1, 'filter/kept': kept}


def pack(
    held: Played, count: jax.Array, played: Played, *, settings: UpdateSettings
) -> tuple[Played, jax.Array, jax.Array]:
    """Append the groups of `played` that the filter keeps to the `count` groups in `held`.

    Rows beyond these groups are marked as faulty, which excludes them from training. Returns
    (held, count, number of groups kept from `played`).
    """
    group_size = settings.group_size
    _, keep = settings.algorithm.filter.keep_rows(
        played[0], groups=settings.num_groups, group_size=group_size
    )
    keep = keep.reshape(-1, group_size).any(1)
    held, count_after = refill(held, count, played, keep, group_size=group_size)
    rollout, episodes = held
    empty = jnp.arange(rollout.tokens.shape[0]) >= count_after * group_size
    stop = jnp.where(empty, EpisodeStop.ENV_ERROR, rollout.episode_stop)
    return (rollout.replace(episode_stop=stop), episodes), count_after, keep.sum()


def refill(
    held: Any, count: jax.Array, fresh: Any, keep: jax.Array, *, group_size: int
) -> tuple[Any, jax.Array]:
    """Append the kept groups of `fresh` to the `count` groups in `held`; return (held, count).

    held and fresh are pytrees of arrays [rows, ...]. held has a fixed capacity; groups that do not
    fit are dropped. Dynamic sampling plays rollouts until held is full.
    """
    rows = jax.tree.leaves(held)[0].shape[0]
    slot = count + jnp.cumsum(keep) - 1  # position of each kept group
    slot = jnp.where(keep, slot, rows)  # out of range: dropped
    index = (slot[:, None] * group_size + jnp.arange(group_size)[None]).reshape(-1)
    held = jax.tree.map(lambda old, new: old.at[index].set(new, mode='drop'), held, fresh)
    return held, jnp.minimum(count + keep.sum(), rows // group_size).astype(jnp.int32)


def build_pack(settings: UpdateSettings, rows: Any, whole: Any) -> Any:
    """Return jitted `pack` over the mesh, or None without dynamic sampling."""
    if not settings.algorithm.filter.refill:
        return None
    return jax.jit(functools.partial(pack, settings=settings), out_shardings=(rows, whole, whole))
