"""Continuations of episodes: from which turns they are played, and their random streams."""

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.rollout.episodes import Episodes

FIRST_FORKED = 2**30  # streams of continuations begin here, after those of all episodes
FORK_TURNS = ('every', 'ahead', 'unsure')  # or numbers of turns
FORKS = 'forks'  # in Episodes.extra


@struct.dataclass
class Forks:
    """F continuations of each of E episodes, in the order in which they are played."""

    turn: jax.Array  # int32 [E, F]  turn at whose start it begins, never a later one than the one
    # before it; 0 = none
    token_stream: jax.Array  # int32 [E, F]  as of Episodes: those of the episode replay it
    world_stream: jax.Array  # int32 [E, F]
    unsure: bool = struct.field(pytree_node=False, default=False)  # the turn is chosen when an
    # episode has ended (forks.unsure_turn), and 0 here


def listed(episodes: Episodes) -> Episodes:
    """The episodes, then their continuations: E (1 + F) rows, trunk by trunk."""
    forks = episodes.extra[FORKS]

    def join(trunks, continuations):
        return jnp.concatenate([trunks, continuations.reshape(-1)])

    return Episodes(
        level=join(episodes.level, jnp.repeat(episodes.level, forks.turn.shape[1])),
        token_stream=join(episodes.token_stream, forks.token_stream),
        world_stream=join(episodes.world_stream, forks.world_stream),
    )


def fork_turns(turns: str, max_turns: int) -> tuple[int, ...]:
    """The turns that 'every' or numbers such as '1,3' name; () where it is one of each episode.

    The first turn needs no continuation: the other members of the group begin there too.
    """
    if turns in ('ahead', 'unsure'):
        return ()
    if turns == 'every':
        return tuple(range(1, max_turns))
    named = [word.strip() for word in turns.split(',')]
    found = sorted({int(word) for word in named if word.isdecimal()})
    if len(found) != len(named) or found[0] < 1 or found[-1] >= max_turns:
        raise ValueError(
            f'fork.turns={turns!r} must be every, ahead, unsure, or different turns from 1 to '
            f'{max_turns - 1} such as 1,2 (the first turn is 0 and needs no continuation)'
        )
    return tuple(found)


def forks_of_each(turns: str, max_turns: int, continuations: int) -> int:
    """Continuations that an episode has at the most."""
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
    """`continuations` from the start of each of the turns, the last turn first.

    'ahead' draws one turn for each episode before it is played: a turn chosen among those that were
    played would be found more often in long episodes. 'unsure' leaves the choice to the rollout.
    common: with the luck of the episode.
    """
    named = fork_turns(turns, max_turns)
    count = forks_of_each(turns, max_turns, continuations)
    rows = episodes.level.shape[0]
    turn = jnp.repeat(jnp.asarray(named[::-1], jnp.int32), continuations)[None]
    if turns == 'unsure':
        turn = jnp.zeros((rows, 1), jnp.int32)
    elif turns == 'ahead':
        turn = jax.random.randint(key, (rows, 1), 1, max_turns, jnp.int32)
    own = episodes.token_stream[:, None] * count + jnp.arange(count, dtype=jnp.int32)[None]
    world = episodes.world_stream[:, None] if common else FIRST_FORKED + own
    shape = (rows, count)
    return Forks(
        turn=jnp.broadcast_to(turn, shape),
        token_stream=FIRST_FORKED + own,
        world_stream=jnp.broadcast_to(world, shape),
        unsure=turns == 'unsure',
    )


def with_forks(key: jax.Array, step: jax.Array, episodes: Episodes, **which) -> Episodes:
    """The episodes of a step with their continuations; which: of draw_forks."""
    k_forks = jax.random.fold_in(jax.random.fold_in(key, step), FIRST_FORKED)
    return episodes.replace(extra={FORKS: draw_forks(k_forks, episodes, **which)})
