"""Rewards on action tokens, and recursions over them: GAE and rewards-to-go.

Recursions run over masked tokens and skip everything else, so the number and content of observation
tokens change no advantage. Values off the mask are 0.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.rl import masked
from agentrl_jax.rl.advantages import equal, next_masked, per_turn, to_tokens, turn_ends
from agentrl_jax.types import Rollout


def episode_ends(action_mask: jax.Array) -> jax.Array:
    """Last action token of each row, bool [B, T]."""
    return turn_ends(action_mask, jnp.zeros_like(action_mask, jnp.int32))


def place_on_turn_ends(rewards: jax.Array, action_mask: jax.Array, turn: jax.Array) -> jax.Array:
    """Place the reward of each turn on its last action token: [B, K] -> [B, T]."""
    return to_tokens(rewards, turn, turn_ends(action_mask, turn))


def place_on_episode_end(returns: jax.Array, action_mask: jax.Array) -> jax.Array:
    """Place the return of each episode on its last action token: [B] -> [B, T]."""
    return jnp.where(episode_ends(action_mask), returns[:, None], 0.0)


def token_rewards(rollout: Rollout, mask: jax.Array, *, reward_on: str) -> jax.Array:
    """Place each turn's reward and penalty at its end, or the return at the last token; [B, T]."""
    if reward_on == 'turn':
        return place_on_turn_ends(rollout.turn_returns, mask, rollout.turn)
    return place_on_episode_end(rollout.returns, mask)


def linear_recursion(x: jax.Array, decay: jax.Array) -> jax.Array:
    """y_t = x_t + decay_t y_{t+1} with y = 0 after the end; [B, T], in log2(T) passes."""

    def compose(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    return jax.lax.associative_scan(compose, (decay, x), axis=1, reverse=True)[1]


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    gamma: float,
    lam: float | jax.Array,
    bootstrap: jax.Array | None = None,
) -> jax.Array:
    """delta_t = r_t + gamma V_n - V_t;  A_t = delta_t + gamma lam A_n;  n = next masked token.

    arXiv:1506.02438 eq. 16, skipping observation tokens. All [B, T]; 0 off the mask. lam: a number,
    or one per row [B, 1]. V_n and A_n count as 0 where `bootstrap` bool [B, T] is false.
    """
    bootstrap = mask if bootstrap is None else bootstrap
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    next_values = jnp.where(bootstrap, next_masked(values, mask, 0.0), 0.0)
    deltas = jnp.where(mask, rewards + gamma * next_values - values, 0.0)
    decay = jnp.where(mask, jnp.where(bootstrap, gamma * lam, 0.0), 1.0)  # 1: skip the token
    return jnp.where(mask, linear_recursion(deltas, decay.astype(deltas.dtype)), 0.0)


def rewards_to_go(rewards: jax.Array, mask: jax.Array, *, gamma: float) -> jax.Array:
    """R_t = r_t + gamma R_n over masked tokens; [B, T]."""
    return gae(rewards, jnp.zeros_like(rewards), mask, gamma=gamma, lam=1.0)


def _turn_sums(rewards, mask, turn, ends):
    """Place the sum of each turn's rewards at its end, 0 elsewhere; [B, T]."""
    return to_tokens(per_turn(rewards, turn, mask, turns=rewards.shape[1]), turn, ends)


def turn_wise_gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    turn: jax.Array,
    *,
    turn_gamma: float,
    lam: float,
) -> jax.Array:
    """GAE over turn ends only, copied to every token of the turn; all [B, T] (VAGEN).

    delta_k = r_k + turn_gamma V[E_{k+1}] - V[E_k], with E_k the last action token of turn k and r_k
    the sum of its token rewards (a KL term is on every token).
    """
    ends = turn_ends(mask, turn)
    summed = _turn_sums(rewards, mask, turn, ends)
    at_ends = gae(summed, values, ends, gamma=turn_gamma, lam=lam)
    turn_advantages = jnp.where(ends, at_ends, next_masked(at_ends, ends, 0.0))
    return jnp.where(mask, turn_advantages, 0.0)


def bi_level_gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    turn: jax.Array,
    *,
    gamma: float,
    turn_gamma: float,
    lam: float,
) -> jax.Array:
    """GAE over turn ends (turn_gamma, lam), then inside each turn (gamma, lam); all [B, T].

    A_k + V[E_k] from the turn level replaces the reward at the turn end E_k. The token level
    restarts there, so A[E_k] = A_k (RAGEN, VAGEN). Turn ends are explicit: a turn with reward 0
    still counts. Rewards of inner tokens (a KL term) reach earlier turns through the turn level,
    where r_k is the sum over turn k, and tokens of the same turn through the token level only.
    """
    ends = turn_ends(mask, turn)
    summed = _turn_sums(rewards, mask, turn, ends)
    at_ends = gae(summed, values, ends, gamma=turn_gamma, lam=lam)
    at_ends = at_ends - jnp.where(ends, summed - rewards, 0.0)
    rewards = jnp.where(ends, at_ends + jnp.where(ends, values, 0.0), rewards)
    return gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=mask & ~ends)


def whiten(
    x: jax.Array, mask: jax.Array, over: jax.Array | None = None, scale: jax.Array | None = None
) -> jax.Array:
    """(x - mean) / sqrt(var + 1e-8), var unbiased, statistics over `over` (mask if None); [B, T].

    A mask of one token gives 0. Values that are equal up to rounding give exactly 0: otherwise the
    eps would multiply their rounding by 1e4, and Adam would take full steps along that noise.
    scale: broadcasts to [B, T].
    """
    over = mask if over is None else over
    x = jnp.where(mask, x, 0.0)
    centred, var = x - masked.masked_mean(x, over), masked.masked_var(x, over, ddof=1)
    return jnp.where(mask & ~equal(x, over, scale), centred * jax.lax.rsqrt(var + 1e-8), 0.0)
