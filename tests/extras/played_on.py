"""Continuations in the environments of exact_gradients, and the advantages of vine."""

import dataclasses

import exact_gradients as bench
import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.vine.credit import vine_advantages


@dataclasses.dataclass(frozen=True)
class PlayedOn(bench.Played):
    """Episodes with M continuations from the start of every turn except the first."""

    more_actions: np.ndarray  # int [B, K, M]  first actions of the continuations
    more_returns: jax.Array  # float32 [B, K, M]
    more_healthy: np.ndarray  # bool [B, K, M]


def play_on(world, played, times, rng):
    """Play continuations of episodes."""
    rows, turns = played.states.shape
    actions, returns, healthy = (np.zeros((rows, turns, times)) for _ in range(3))
    for k in range(1, turns):
        reached = np.asarray(played.num_turns) > k
        for m in range(times):
            fresh = bench.play(world, rows, rng, first=k, state=played.states[:, k])
            actions[:, k, m] = fresh.actions[:, 0]
            returns[:, k, m] = fresh.rewards.sum(1) + fresh.outcome
            healthy[:, k, m] = np.asarray(fresh.healthy) & reached
    return PlayedOn(
        **vars(played),
        more_actions=actions.astype(int),
        more_returns=jnp.asarray(returns, jnp.float32),
        more_healthy=healthy.astype(bool),
    )


def by_continuations(played, members):
    """Return [(turns that train, their advantages [B, K])] of vine."""
    rows, turns, times = played.more_actions.shape
    turn = jnp.broadcast_to(jnp.repeat(jnp.arange(turns), times)[None], (rows, turns * times))
    own, forked, count = vine_advantages(
        played.all_rewards,
        played.num_turns,
        played.healthy,
        turn,
        played.more_returns.reshape(rows, -1),
        jnp.asarray(played.more_healthy.reshape(rows, -1)),
        group_size=members,
    )
    weight, forked = 1.0 / (1 + count), forked.reshape(rows, turns, times)
    continued = (
        dataclasses.replace(played, actions=played.more_actions[:, :, m]) for m in range(times)
    )
    return [(played, own * weight)] + [
        (one, forked[:, :, m] * weight) for m, one in enumerate(continued)
    ]
