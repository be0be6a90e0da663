"""Continuations of episodes: their first turns and random streams."""

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout.episodes import Episodes

FIRST_FORKED = 2**30  # first stream of continuations, above the streams of all episodes
FORKS = 'forks'  # in Episodes.extra


@struct.dataclass
class Forks:
    """F continuations of each of E episodes, in playing order."""

    turn: jax.Array  # int32 [E, F]  first turn of the continuation, never increasing along F
    token_stream: jax.Array  # int32 [E, F]  as in Episodes: the episode's streams would replay it
    world_stream: jax.Array  # int32 [E, F]


def with_forks(episodes: Episodes, *, continuations: int, max_turns: int) -> Episodes:
    """Add `continuations` continuations from the start of each turn after the first.

    The last turn comes first. The first turn needs none: the other members of the group start there
    too.
    """
    turn = jnp.repeat(jnp.arange(max_turns - 1, 0, -1, dtype=jnp.int32), continuations)
    number = jnp.arange(len(turn), dtype=jnp.int32)[None]
    stream = FIRST_FORKED + episodes.token_stream[:, None] * len(turn) + number
    forks = Forks(jnp.broadcast_to(turn, stream.shape), token_stream=stream, world_stream=stream)
    return episodes.replace(extra={FORKS: forks})


def listed(episodes: Episodes) -> Episodes:
    """List the episodes, then their continuations trunk by trunk: E (1 + F) rows."""
    forks = episodes.extra[FORKS]

    def join(trunks, continuations):
        return jnp.concatenate([trunks, continuations.reshape(-1)])

    return Episodes(
        level=join(episodes.level, jnp.repeat(episodes.level, forks.turn.shape[1])),
        token_stream=join(episodes.token_stream, forks.token_stream),
        world_stream=join(episodes.world_stream, forks.world_stream),
    )
