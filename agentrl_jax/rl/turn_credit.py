"""Per-turn advantages without a critic, as in turn_grpo, MT-GRPO and GiGPO.

Turn k is compared with the rewards of all other members from turn k on (turn_grpo), with turn k of
the members that reached it (MT-GRPO), or with turns of the group with the same observation (GiGPO).
Advantages are [B, K], 0 for turns that were not played. benchmarks/turn_credit.md compares bias and
variance.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import recursions
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.types import Rollout, Scores

MODES = ('or', 'mr', 'mt_v1', 'mt_cumulative', 'mt_local', 'gtpo', 'hybrid', 'flattened')


def turn_kl(
    algorithm: Algorithm,
    rollout: Rollout,
    scores: Scores,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return token_kl summed over each turn; [B, K]."""
    turns = rollout.rewards.shape[1]
    kl, scale = (
        adv.per_turn(x, rollout.turn, mask, turns=turns) for x in algorithm.token_kl(scores, mask)
    )
    return kl, scale


def turn_rewards(
    algorithm: Algorithm,
    rollout: Rollout,
    scores: Scores,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (reward + penalty - KL in the reward, its rounding scale) per turn; [B, K]."""
    kl, scale = turn_kl(algorithm, rollout, scores, mask)
    return rollout.turn_returns - kl, rollout.magnitudes.turn_returns + scale


def reached_turns(num_turns: jax.Array, healthy: jax.Array, turns: int) -> jax.Array:
    """Mask of the turns that healthy episodes reached; bool [B, turns]."""
    return healthy[:, None] & (jnp.arange(turns)[None] < num_turns[:, None])


def discounted_to_go(
    rewards: jax.Array, outcome: jax.Array, num_turns: jax.Array, *, gamma: float
) -> jax.Array:
    """sum_{l >= k} gamma^(l-k) r_l + gamma^(last-k) o with last = num_turns - 1; [B, K]."""
    suffix = recursions.linear_recursion(rewards, jnp.full_like(rewards, gamma))
    left = jnp.maximum(num_turns[:, None] - 1 - jnp.arange(rewards.shape[1])[None], 0)
    return suffix + jnp.asarray(gamma, rewards.dtype) ** left * outcome[:, None]


def leave_one_out_to_go(
    rewards: jax.Array,
    num_turns: jax.Array,
    healthy: jax.Array,
    *,
    group_size: int,
    scale: jax.Array | None = None,
) -> jax.Array:
    """sum_{l >= k} r_l minus its mean over the other healthy members; [B, K].

    A member that ended before turn k counts as 0. The baseline is therefore independent of the
    episode, including its decision to stop. scale [B, K]: magnitude of the terms of each reward;
    None: |rewards|.
    """
    reached = reached_turns(num_turns, healthy, rewards.shape[1])
    to_go, scale = _sums_to_go(rewards, scale, reached)
    members = jnp.broadcast_to(healthy[:, None], reached.shape)
    alone = adv.leave_one_out(to_go, members, group_size=group_size, scale=scale)
    return jnp.where(reached, alone, 0.0)


def _sums_to_go(rewards, scale, reached):
    """Return the rewards to go of each turn and the scale of their rounding, [B, K] each."""
    scale = jnp.abs(rewards) if scale is None else scale
    r, scale = jnp.where(reached, rewards, 0.0), jnp.where(reached, scale, 0.0)
    ones = jnp.ones_like(r)
    return recursions.linear_recursion(r, ones), recursions.linear_recursion(scale, ones)


def step_advantages(
    returns: jax.Array,
    anchors: jax.Array,
    played: jax.Array,
    *,
    group_size: int,
    norm: str = 'mean',
    scale: jax.Array | None = None,
) -> jax.Array:
    """GiGPO's A_S: return to go minus its mean over group turns with the same anchor; [B, K].

    norm 'mean' divides by 1, 'std' by the unbiased std + 1e-6. A turn with a unique anchor gets 0
    (arXiv:2505.10978). scale [B, K]: magnitude of the terms of each return; None: |returns|.
    """
    turns = returns.shape[1]
    scale = jnp.abs(returns) if scale is None else scale
    r, scale, ok, anchor = (
        x.reshape(-1, group_size * turns)
        for x in (jnp.where(played, returns, 0.0), scale, played, anchors)
    )
    same = (anchor[:, :, None] == anchor[:, None, :]) & ok[:, :, None] & ok[:, None, :]
    count = same.sum(2)
    mean = jnp.where(same, r[:, None, :], 0.0).sum(2) / jnp.maximum(count, 1)
    out = r - mean
    if norm == 'std':
        spread = jnp.where(same, r[:, None, :] - mean[:, :, None], 0.0)
        std = jnp.sqrt((spread**2).sum(2) / jnp.maximum(count - 1, 1))
        out = out / (std + 1e-6)
    equal = adv.equal(r[:, None], same, scale[:, None], axis=2)
    return jnp.where(ok & ~equal, out, 0.0).reshape(returns.shape)
