"""Rewards of episodes that try a level several times (text.agents).

whole: what the trials earned is summed up, as the worlds pay it.
gain: the first turn of each further trial, which is its reflection where there is one, also takes
  back what the trial before earned. From that turn on an episode then earns the gain of this trial
  over the one before (and of those that follow), which is what to-go credit gives the reflection,
  and in all what its last trial earned. Where a turn is credited with its own reward alone
  (turn_credit.mode=mt_local), that turn gets the gain itself: what its trial earns is added.

A trial without a turn that acts, since tokens ran out after its reflection or plan, was not tried:
it takes nothing back, and no figure counts it.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.types import Rollout

REWARDS = ('whole', 'gain')


def first_turns(trial: jax.Array, num_turns: jax.Array) -> jax.Array:
    """bool [B, K]: the turns that begin a further trial."""
    before = jnp.pad(trial[:, :-1], ((0, 0), (1, 0)))
    return (trial != before) & (jnp.arange(trial.shape[1])[None] < num_turns[:, None])


def tried(rollout: Rollout) -> jax.Array:
    """bool [B, K]: the turns that step the world and were played."""
    return rollout.acts & (jnp.arange(rollout.acts.shape[1])[None] < rollout.num_turns[:, None])


def last(rollout: Rollout) -> jax.Array:
    """The last trial of each episode that was tried, int32 [B]."""
    return jnp.max(jnp.where(tried(rollout), rollout.trial, 0), axis=1)


def earned(rewards: jax.Array, trial: jax.Array, number: jax.Array) -> jax.Array:
    """Sum of the rewards [B, K] of the trials of a number int32 [B, ...]; [B, ...]."""
    shape = (trial.shape[0], *(1,) * (number.ndim - 1), trial.shape[1])
    mine = trial.reshape(shape) == number[..., None]
    return jnp.where(mine, rewards.reshape(shape), 0.0).sum(-1)


def gain_rewards(rollout: Rollout, *, local: bool = False) -> Rollout:
    """The rollout with the rewards of `gain`; local: for credit that does not look ahead."""
    first = first_turns(rollout.trial, rollout.num_turns)
    first &= rollout.trial <= last(rollout)[:, None]
    gain = -earned(rollout.rewards, rollout.trial, rollout.trial - 1)
    if local:
        gain += earned(rollout.rewards, rollout.trial, rollout.trial)
    return rollout.replace(rewards=rollout.rewards + jnp.where(first, gain, 0.0))
