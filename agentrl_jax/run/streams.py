"""The random streams of a run: everything random is a function of (seed, stream, step)."""

import dataclasses

import jax
import numpy as np

LEVELS, COLLECT, EVALUATE, CLONE, SHUFFLE, REFILL, PAIRS, BASE, ADAPTERS, OPPONENT = range(10)
AFTER_ROLL_BACK = 1 << 20  # streams of training after a roll back lie from here on


@dataclasses.dataclass(frozen=True)
class Streams:
    """Random streams of a run after a number of roll backs.

    Each roll back brings new levels and new episodes: with the old ones it would collapse again.
    """

    seed: int
    roll_backs: int = 0

    def key(self, stream: int, step: int = 0) -> jax.Array:
        """The key of one purpose at one step; nothing else in a run is random."""
        if stream in (LEVELS, COLLECT, REFILL):
            stream += AFTER_ROLL_BACK * self.roll_backs
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), stream), step)

    def draw(self, stream: int, step: int, count: int) -> int:
        """One of `count` numbers, on the host."""
        seeds = (self.seed, stream + AFTER_ROLL_BACK * self.roll_backs, step)
        return int(np.random.default_rng(seeds).integers(count))
