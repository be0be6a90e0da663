"""The episodes of a rollout: their levels and random streams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Episodes:
    """The episodes to play, group-major."""

    level: jax.Array  # int32 [E]  level of the environment's pool; equal within a group
    token_stream: jax.Array  # int32 [E]  random stream of the sampled tokens, distinct
    world_stream: jax.Array  # int32 [E]  stream of the environment; equal = common random numbers
    extra: dict[str, Any] = struct.field(default_factory=dict)  # of extensions, by name


def draw_episodes(
    key: jax.Array,
    step: jax.Array,
    first: jax.Array | int = 0,
    *,
    levels: int,
    groups: int,
    group_size: int,
) -> Episodes:
    """Draw the levels of a step, without replacement if the pool has enough of them.

    Each episode has its own random streams. `first` is the number of the first stream, so that
    further rollouts of a step can use different streams.
    """
    k_levels = jax.random.fold_in(key, step)
    chosen = jax.random.choice(k_levels, levels, (groups,), replace=groups > levels)
    row = jnp.arange(groups * group_size, dtype=jnp.int32)
    return Episodes(
        level=jnp.repeat(chosen.astype(jnp.int32), group_size),
        token_stream=first + row,
        world_stream=first + row,
    )


def every_level(episodes: int, levels: int, shards: int, samples: int = 1) -> Episodes:
    """Return `episodes` episodes that cycle through a pool's levels, repeated `samples` times.

    The number is padded to a multiple of shards.
    """
    total = episodes * samples
    rows = np.arange(-(-total // shards) * shards, dtype=np.int32)
    level = np.where(rows < total, rows % episodes % levels, rows % levels)
    return Episodes(level=level, token_stream=rows, world_stream=rows)
