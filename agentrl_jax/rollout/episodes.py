"""The episodes of a rollout: their levels, random streams and continuations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

FIRST_FORKED = 2**30  # streams of continuations begin here, after those of all episodes
FORK_TURNS = ('every', 'ahead', 'unsure')  # or numbers of turns


@struct.dataclass
class Forks:
    """F continuations of each of E episodes, in the order in which they are played."""

    turn: jax.Array  # int32 [E, F]  turn at whose start it begins, never a later one than the one
    # before it; 0 = none
    token_stream: jax.Array  # int32 [E, F]  as of Episodes: those of the episode replay it
    world_stream: jax.Array  # int32 [E, F]
    unsure: bool = struct.field(pytree_node=False, default=False)  # the turn is chosen when an
    # episode has ended (forks.unsure_turn), and 0 here


@struct.dataclass
class Episodes:
    """The episodes to play, group-major."""

    level: jax.Array  # int32 [E]  level of the environment's pool; equal within a group
    token_stream: jax.Array  # int32 [E]  random stream of the sampled tokens, different for all
    world_stream: jax.Array  # int32 [E]  random stream of the world; equal = common random numbers
    forks: Forks | None = None

    @property
    def listed(self) -> 'Episodes':
        """The episodes, then their continuations: E (1 + F) rows, trunk by trunk."""
        if self.forks is None:
            return self
        forks = self.forks

        def join(trunks, continuations):
            return jnp.concatenate([trunks, continuations.reshape(-1)])

        return Episodes(
            level=join(self.level, jnp.repeat(self.level, forks.turn.shape[1])),
            token_stream=join(self.token_stream, forks.token_stream),
            world_stream=join(self.world_stream, forks.world_stream),
        )


def draw_episodes(
    key: jax.Array,
    step: jax.Array,
    first: jax.Array | int = 0,
    *,
    levels: int,
    groups: int,
    group_size: int,
    common: bool,
    forks: Callable | None = None,
) -> Episodes:
    """Levels of a step, without repetition where the pool allows; own random streams for all.

    `first` is the number of the first stream: further rollouts of a step have streams of their own.
    forks: draw_forks of a key and the episodes.
    """
    k_levels = jax.random.fold_in(key, step)
    chosen = jax.random.choice(k_levels, levels, (groups,), replace=groups > levels)
    row = jnp.arange(groups * group_size, dtype=jnp.int32)
    drawn = Episodes(
        level=jnp.repeat(chosen.astype(jnp.int32), group_size),
        token_stream=first + row,
        world_stream=first + (row // group_size if common else row),
    )
    if forks is None:
        return drawn
    k_forks = jax.random.fold_in(jax.random.fold_in(key, step), FIRST_FORKED)
    return drawn.replace(forks=forks(k_forks, drawn))


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


def every_level(episodes: int, levels: int, shards: int, samples: int = 1) -> Episodes:
    """`episodes` episodes over the levels of a pool in turn, `samples` times one after another.

    Filled up to a multiple of shards.
    """
    total = episodes * samples
    rows = np.arange(-(-total // shards) * shards, dtype=np.int32)
    level = np.where(rows < total, rows % episodes % levels, rows % levels)
    return Episodes(level=level, token_stream=rows, world_stream=rows)
