"""Advantages of single turns without a critic: those of turn_grpo, MT-GRPO, GiGPO and vine.

A turn is compared with what every other member of the group earned from that turn on (turn_grpo),
with turn k of those that reached it (MT-GRPO), with the turns of the group that saw the same
observation (GiGPO), or with others played from the very same start (vine). [B, K], 0 for turns that
were not played. benchmarks/turn_credit.md has the bias and variance of each.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv

MODES = ('or', 'mr', 'mt_v1', 'mt_cumulative', 'mt_local', 'gtpo', 'hybrid', 'flattened')


def turns_played(num_turns: jax.Array, healthy: jax.Array, turns: int) -> jax.Array:
    """bool [B, turns]: turns of healthy episodes that were reached."""
    return healthy[:, None] & (jnp.arange(turns)[None] < num_turns[:, None])


def discounted_to_go(
    rewards: jax.Array, outcome: jax.Array, num_turns: jax.Array, *, gamma: float
) -> jax.Array:
    """sum_{l >= k} gamma^(l-k) r_l + gamma^(last-k) o with last = num_turns - 1; [B, K]."""
    suffix = adv.linear_recursion(rewards, jnp.full_like(rewards, gamma))
    left = jnp.maximum(num_turns[:, None] - 1 - jnp.arange(rewards.shape[1])[None], 0)
    return suffix + jnp.asarray(gamma, rewards.dtype) ** left * outcome[:, None]


def against_others(
    rewards: jax.Array,
    num_turns: jax.Array,
    healthy: jax.Array,
    *,
    group_size: int,
    scale: jax.Array | None = None,
) -> jax.Array:
    """sum_{l >= k} r_l less the mean of that over the other healthy members; [B, K].

    A member that took no turn k counts with the 0 that it earned from there on, so the baseline is
    a number that the episode had no part in and its own decision to stop did not choose.
    scale [B, K]: magnitude of the terms of each reward; None: |rewards|.
    """
    reached = turns_played(num_turns, healthy, rewards.shape[1])
    to_go, scale = _sums_to_go(rewards, scale, reached)
    members = jnp.broadcast_to(healthy[:, None], reached.shape)
    alone = adv.leave_one_out(to_go, members, group_size=group_size, scale=scale)
    return jnp.where(reached, alone, 0.0)


def _sums_to_go(rewards, scale, reached):
    """Rewards from each turn on and the scale of their rounding, [B, K] each."""
    scale = jnp.abs(rewards) if scale is None else scale
    r, scale = jnp.where(reached, rewards, 0.0), jnp.where(reached, scale, 0.0)
    ones = jnp.ones_like(r)
    return adv.linear_recursion(r, ones), adv.linear_recursion(scale, ones)


def turn_advantages(
    rewards: jax.Array,
    outcome: jax.Array,
    num_turns: jax.Array,
    healthy: jax.Array,
    *,
    group_size: int,
    mode: str = 'mt_cumulative',
    turn_coef: float = 1.0,
    outcome_coef: float = 1.0,
    gamma: float = 0.9,
    norm: str = 'std',
    eps: float = 1e-4,
    std_floor: float = 0.0,
    acts: jax.Array | None = None,
    scale: jax.Array | None = None,
    outcome_scale: jax.Array | None = None,
) -> jax.Array:
    """Advantage of each turn from turn rewards r [B, K] and outcomes o [B]; [B, K].

    norm compares whole episodes, norm_k turn k over the members that reached it (0 if fewer than
    two); c = turn_coef, w = outcome_coef. acts bool [B, K]: turns that step the world; those that
    only write before the first one count as part of it in mt_v1. None: all act.
    scale [B, K], outcome_scale [B]: magnitude of the terms of r and o; None: |r| and |o|.
      or             w norm(o)                                         GRPO-OR
      mr             norm(c sum_l r_l + w o)                           GRPO-MR: add, then normalise
      mt_v1          w norm(o), plus c norm_0(r_0) in the first turn   MT-GRPO (arXiv:2505.11821 v1)
      mt_cumulative  c sum_{l >= k} norm_l(r_l) + w norm(o)            K turns (arXiv:2604.02869)
      mt_local       c norm_k(r_k) + w norm(o)
      gtpo           norm_k(c sum_{l >= k} gamma^(l-k) r_l + w gamma^(last-k) o)
      hybrid         c norm_k(sum_{l >= k} gamma^(l-k) r_l + gamma^(last-k) o) + w norm(o)
      flattened      mt_cumulative's first turn in all turns: the content without the placement
    Bias, as estimators of the gradient of c sum_l r_l + w o where the policy decides when to stop:
      norm_k(r_k)  compares the members that reached turn k, and so takes out what reaching it is
              worth: what a further turn earns or costs does not reach the decision to take it
              (mt_v1, mt_cumulative, mt_local; flattened gives all turns such a sum)
      norm_k(sum_{l >= k} ...)  contains it, but n members that reached turn k share a mean with
              themselves, the factor (n - 1) / n, and one alone gets 0: the later a turn, the less
              it counts (gtpo, hybrid)
      std     divides by a number that the episode's own return is part of; 'mean' does not
      or      leaves the turn rewards out of the gradient, on purpose
      gamma   below 1 is the gradient of a discounted return (gtpo, hybrid)
    Without bias, but for the constant (G - 1) / G: mr and or with norm 'mean'. `against_others` is
    unbiased and credits turns.
    """
    reached = turns_played(num_turns, healthy, rewards.shape[1])
    scale = jnp.abs(rewards) if scale is None else scale
    outcome_scale = jnp.abs(outcome) if outcome_scale is None else outcome_scale
    r, r_scale = (jnp.where(reached, x, 0.0) for x in (rewards, scale))
    o, o_scale = (jnp.where(healthy, x, 0.0).astype(r.dtype) for x in (outcome, outcome_scale))

    def compare(x, scale, ok):
        x = jnp.where(ok, x, 0.0)
        sizes = dict(group_size=group_size, scale=scale)
        return adv.compare(x, ok, norm=norm, eps=eps, std_floor=std_floor, **sizes)

    def to_go(c, w):
        sums = discounted_to_go(c * r, w * o, num_turns, gamma=gamma)
        terms = (abs(c) * r_scale, abs(w) * o_scale)
        return compare(sums, discounted_to_go(*terms, num_turns, gamma=gamma), reached)

    def local():
        return turn_coef * compare(r, r_scale, reached)

    def suffix():
        return jnp.cumsum(local()[:, ::-1], axis=1)[:, ::-1]

    def merged():
        terms = abs(turn_coef) * r_scale.sum(1) + abs(outcome_coef) * o_scale
        return compare(turn_coef * r.sum(1) + outcome_coef * o, terms, healthy)[:, None]

    whole = outcome_coef * compare(o, o_scale, healthy)[:, None]
    acted = jnp.ones_like(reached) if acts is None else acts
    first = jnp.cumsum(acted, axis=1) - acted == 0

    def opening():
        earned, terms = (jnp.where(first, x, 0.0).sum(1, keepdims=True) for x in (r, r_scale))
        return jnp.where(first, turn_coef * compare(earned, terms, reached[:, :1]), 0.0)

    modes = {
        'or': lambda: whole,
        'mr': merged,
        'mt_v1': lambda: whole + opening(),
        'mt_cumulative': lambda: whole + suffix(),
        'mt_local': lambda: whole + local(),
        'gtpo': lambda: to_go(turn_coef, outcome_coef),
        'hybrid': lambda: turn_coef * to_go(1.0, 1.0) + whole,
        'flattened': lambda: whole + suffix()[:, :1],
    }
    return jnp.where(reached, jnp.broadcast_to(modes[mode](), r.shape), 0.0)


def step_advantages(
    returns: jax.Array,
    anchors: jax.Array,
    played: jax.Array,
    *,
    group_size: int,
    norm: str = 'mean',
    scale: jax.Array | None = None,
) -> jax.Array:
    """GiGPO's A_S: return-to-go less the mean over turns of the group with the same anchor; [B, K].

    norm 'mean' divides by 1, 'std' by the unbiased std + 1e-6. A turn whose anchor nobody else saw
    gets 0 (arXiv:2505.10978). scale [B, K]: magnitude of the terms of each return; None: |returns|.
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
