"""The random streams of a run: everything random is a function of (seed, stream, step)."""

import dataclasses

import jax
import numpy as np

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
