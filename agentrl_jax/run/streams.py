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
        """The key of one purpose at one step; nothing else in a run is random."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), stream), step)

    def draw(self, stream: int, step: int, count: int) -> int:
        """One of `count` numbers, on the host."""
        return int(np.random.default_rng((self.seed, stream, step)).integers(count))
