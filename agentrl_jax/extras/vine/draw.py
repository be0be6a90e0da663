"""Continuations of episodes: their first turns and random streams."""

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout.episodes import Episodes

FIRST_FORKED = 2**30  # first stream of continuations, above the streams of all episodes
FORK_TURNS = ('every', 'ahead', 'unsure')  # or turn numbers
FORKS = 'forks'  # in Episodes.extra


@struct.dataclass
class Forks:
    """F continuations of each of E episodes, in playing order."""

    turn: jax.Array  # int32 [E, F]  first turn of the continuation, never increasing along F; 0 =
    # none
    token_stream: jax.Array  # int32 [E, F]  as in Episodes: the episode's streams would replay it
    world_stream: jax.Array  # int32 [E, F]
    unsure: bool = struct.field(pytree_node=False, default=False)  # turn is 0 here and chosen when
    # the episode has ended (forks.unsure_turn)


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


def fork_turns(turns: str, max_turns: int) -> tuple[int, ...]:
    """Return the turns of 'every' or of numbers such as '1,3'; () for 'ahead' and 'unsure'.

    The first turn needs no continuation: the other members of the group start there too.
    """
    if turns in ('ahead', 'unsure'):
        return ()
    if turns == 'every':
        return tuple(range(1, max_turns))
    named = [word.strip() for word in turns.split(',')]
    numbers = sorted({int(word) for word in named if word.isdecimal()})
    if len(numbers) != len(named) or numbers[0] < 1 or numbers[-1] >= max_turns:
        raise ValueError(
            f'fork.turns={turns!r} must be every, ahead, unsure, or different turns from 1 to '
            f'{max_turns - 1}, such as 1,2 (the first turn is 0 and needs no continuation)'
        )
    return tuple(numbers)


def forks_of_each(turns: str, max_turns: int, continuations: int) -> int:
    """Return the maximum number of continuations per episode."""
    return continuations * (len(fork_turns(turns, max_turns)) or 1)


def draw_forks(
    key: jax.Array,
    episodes: Episodes,
    *,
    turns: str,
    continuations: int,
    max_turns: int,
    common: bool,
) -> Forks:
    """Draw `continuations` continuations from the start of each turn, the last turn first.

    'ahead' draws one turn per episode before it is played: a choice among the played turns would
    favour long episodes. 'unsure' leaves the choice to the rollout. common: share the environment's
    random numbers with the episode.
    """
    named = fork_turns(turns, max_turns)
    count = forks_of_each(turns, max_turns, continuations)
    rows = episodes.level.shape[0]
    turn = jnp.repeat(jnp.asarray(named[::-1], jnp.int32), continuations)[None]
    if turns == 'unsure':
        turn = jnp.zeros((rows, 1), jnp.int32)
    elif turns == 'ahead':
        turn = jax.random.randint(key, (rows, 1), 1, max_turns, jnp.int32)
    streams = episodes.token_stream[:, None] * count + jnp.arange(count, dtype=jnp.int32)[None]
    world = episodes.world_stream[:, None] if common else FIRST_FORKED + streams
    shape = (rows, count)
    return Forks(
        turn=jnp.broadcast_to(turn, shape),
        token_stream=FIRST_FORKED + streams,
        world_stream=jnp.broadcast_to(world, shape),
        unsure=turns == 'unsure',
    )


def with_forks(key: jax.Array, step: jax.Array, episodes: Episodes, **which) -> Episodes:
    """Return the episodes of a step with continuations; which: keywords of draw_forks."""
    k_forks = jax.random.fold_in(jax.random.fold_in(key, step), FIRST_FORKED)
    return episodes.replace(extra={FORKS: draw_forks(k_forks, episodes, **which)})
