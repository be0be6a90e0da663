"""Random streams and episodes of a run: functions of (seed, stream, step)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.types import Episodes

LEVELS, COLLECT, EVALUATE, CLONE, SHUFFLE, REFILL, PAIRS, BASE, ADAPTERS, OPPONENT = range(10)


@dataclasses.dataclass(frozen=True)
class Streams:
    """The random streams of a run."""

    seed: int

    def key(self, stream: int, step: int = 0) -> jax.Array:
        """Return the key of a stream at a step. All randomness of a run derives from `Streams`."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), stream), step)

    def draw(self, stream: int, step: int, count: int) -> int:
        """Draw an integer below `count` on the host."""
        return int(np.random.default_rng((self.seed, stream, step)).integers(count))


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
