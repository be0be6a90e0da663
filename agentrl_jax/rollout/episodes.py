"""The episodes of a rollout: levels, random streams, and the empty record that is filled."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.text.wording import Wording
from agentrl_jax.types import Rollout


@struct.dataclass
class Episodes:
    """The episodes to play, group-major."""

    level: jax.Array  # int32 [E]  level of the environment's pool; equal within a group
    token_stream: jax.Array  # int32 [E]  random stream of the sampled tokens, different for all
    world_stream: jax.Array  # int32 [E]  random stream of the world; equal = common random numbers


def draw_episodes(
    key: jax.Array,
    step: jax.Array,
    first: jax.Array | int = 0,
    *,
    levels: int,
    groups: int,
    group_size: int,
    common: bool,
) -> Episodes:
    """Levels of a step, without repetition where the pool allows; own random streams for all.

    `first` is the number of the first stream: further rollouts of a step have streams of their own.
    """
    chosen = jax.random.choice(
        jax.random.fold_in(key, step), levels, (groups,), replace=groups > levels
    )
    row = jnp.arange(groups * group_size, dtype=jnp.int32)
    return Episodes(
        level=jnp.repeat(chosen.astype(jnp.int32), group_size),
        token_stream=first + row,
        world_stream=first + (row // group_size if common else row),
    )


def every_level(episodes: int, levels: int, shards: int, samples: int = 1) -> Episodes:
    """`episodes` episodes over the levels of a pool in turn, `samples` times one after another.

    Filled up to a multiple of shards.
    """
    total = episodes * samples
    rows = np.arange(-(-total // shards) * shards, dtype=np.int32)
    level = np.where(rows < total, rows % episodes % levels, rows % levels)
    return Episodes(level=level, token_stream=rows, world_stream=rows)


def empty_rollout(
    wording: Wording, level: jax.Array, *, max_tokens: int, max_turns: int, max_actions: int
) -> Rollout:
    """E episodes of the given levels int32 [E] that hold nothing but the common prefix."""
    rows, prefix = level.shape[0], wording.prefix.shape[0]
    grid, turns = (rows, max_tokens), (rows, max_turns)
    return Rollout(
        tokens=jnp.full(grid, wording.pad_id, jnp.int32).at[:, :prefix].set(wording.prefix[None]),
        logprobs=jnp.zeros(grid, jnp.float32),
        attention_mask=jnp.zeros(grid, bool).at[:, :prefix].set(True),
        action_mask=jnp.zeros(grid, bool),
        turn=jnp.full(grid, -1, jnp.int32).at[:, :prefix].set(0),
        begin=jnp.zeros(turns, jnp.int32),
        anchor=jnp.zeros(turns, jnp.uint32),
        rewards=jnp.zeros(turns, jnp.float32),
        penalties=jnp.zeros(turns, jnp.float32),
        turn_stop=jnp.zeros(turns, jnp.int32),
        valid=jnp.zeros(turns, bool),
        num_actions=jnp.zeros(turns, jnp.int32),
        actions=jnp.full((*turns, max_actions), -1, jnp.int32),
        num_turns=jnp.zeros(rows, jnp.int32),
        episode_stop=jnp.zeros(rows, jnp.int32),
        success=jnp.zeros(rows, bool),
        level=level,
    )
