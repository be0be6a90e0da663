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
    rewards: jax.Array, num_turns: jax.Array, healthy: jax.Array, *, group_size: int
) -> jax.Array:
    """sum_{l >= k} r_l less the mean of that over the other healthy members; [B, K].

    A member that took no turn k counts with the 0 that it earned from there on, so the baseline is
    a number that the episode had no part in and its own decision to stop did not choose.
    """
    reached = turns_played(num_turns, healthy, rewards.shape[1])
    r = jnp.where(reached, rewards, 0.0)
    to_go = adv.linear_recursion(r, jnp.ones_like(r))
    members = jnp.broadcast_to(healthy[:, None], r.shape)
    return jnp.where(reached, adv.leave_one_out(to_go, members, group_size=group_size), 0.0)


def continued(
    turn: jax.Array, returns: jax.Array, usable: jax.Array, *, turns: int
) -> tuple[jax.Array, jax.Array]:
    """(sum of the returns, number) of the continuations from the start of each turn; [B, turns].

    turn, returns, usable [B, F]: where each begins, what it earned from there, whether it counts.
    """
    at = (turn[:, :, None] == jnp.arange(turns)[None, None]) & usable[:, :, None]
    return jnp.where(at, returns[:, :, None], 0.0).sum(1), at.sum(1)


def against_continuations(
    rewards: jax.Array,
    num_turns: jax.Array,
    healthy: jax.Array,
    turn: jax.Array,
    returns: jax.Array,
    usable: jax.Array,
    *,
    group_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What playing turn k led to, less what others that began it in the same state were led to.

    Returns (advantages of the trunk's turns [B, K], of each continuation's first turn [B, F],
    continuations of each turn int32 [B, K]). With M continuations from the start of turn k:
      target of the trunk        r_k + mean of what was earned from the start of turn k + 1, by its
                                 continuations and by the trunk itself
      target of a continuation   what it earned from turn k on
      advantage                  target less the mean target of the M others; the trunk's others
                                 are the M continuations, so its own return is not in its baseline
    A turn without continuations, as the first, has the group's other members as its others, a stop
    counting as 0 (against_others).
    """
    reached = turns_played(num_turns, healthy, rewards.shape[1])
    r = jnp.where(reached, rewards, 0.0)
    to_go = adv.linear_recursion(r, jnp.ones_like(r))
    usable = usable & healthy[:, None]
    total, count = continued(turn, returns, usable, turns=r.shape[1])
    start = (total + to_go) / (count + 1)
    target = r + jnp.pad(start[:, 1:], ((0, 0), (0, 1)))
    members = jnp.broadcast_to(healthy[:, None], r.shape)
    alone = adv.leave_one_out(target, members, group_size=group_size)
    own = jnp.where(count > 0, target - total / jnp.maximum(count, 1), alone)

    def there(x):
        return jnp.take_along_axis(x, turn, axis=1)

    others = (there(total) - returns + there(target)) / jnp.maximum(there(count), 1)
    forked = jnp.where(usable & (turn > 0), returns - others, 0.0)
    return jnp.where(reached, own, 0.0), forked, count


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
) -> jax.Array:
    """Advantage of each turn from turn rewards r [B, K] and outcomes o [B]; [B, K].

    norm compares whole episodes, norm_k turn k over the members that reached it (0 if fewer than
    two); c = turn_coef, w = outcome_coef. acts bool [B, K]: turns that step the world; those that
    only write before the first one count as part of it in mt_v1. None: all act.
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
    r = jnp.where(reached, rewards, 0.0)
    o = jnp.where(healthy, outcome, 0.0).astype(r.dtype)

    def compare(x, ok):
        x = jnp.where(ok, x, 0.0)
        return adv.compare(x, ok, group_size=group_size, norm=norm, eps=eps, std_floor=std_floor)

    def to_go(c, w):
        return compare(discounted_to_go(c * r, w * o, num_turns, gamma=gamma), reached)

    def suffix():
        return jnp.cumsum(turn_coef * compare(r, reached)[:, ::-1], axis=1)[:, ::-1]

    whole = outcome_coef * compare(o, healthy)[:, None]
    acted = jnp.ones_like(reached) if acts is None else acts
    first = jnp.cumsum(acted, axis=1) - acted == 0

    def opening():
        earned = jnp.where(first, r, 0.0).sum(1, keepdims=True)
        return jnp.where(first, turn_coef * compare(earned, reached[:, :1]), 0.0)

    modes = {
        'or': lambda: whole,
        'mr': lambda: compare(turn_coef * r.sum(1) + outcome_coef * o, healthy)[:, None],
        'mt_v1': lambda: whole + opening(),
        'mt_cumulative': lambda: whole + suffix(),
        'mt_local': lambda: whole + turn_coef * compare(r, reached),
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
) -> jax.Array:
    """GiGPO's A_S: return-to-go less the mean over turns of the group with the same anchor; [B, K].

    norm 'mean' divides by 1, 'std' by the unbiased std + 1e-6. A turn whose anchor nobody else saw
    gets 0 (arXiv:2505.10978).
    """
    turns = returns.shape[1]
    r, ok, anchor = (
        x.reshape(-1, group_size * turns)
        for x in (jnp.where(played, returns, 0.0), played, anchors)
    )
    same = (anchor[:, :, None] == anchor[:, None, :]) & ok[:, :, None] & ok[:, None, :]
    count = same.sum(2)
    mean = jnp.where(same, r[:, None, :], 0.0).sum(2) / jnp.maximum(count, 1)
    out = r - mean
    if norm == 'std':
        spread = jnp.where(same, r[:, None, :] - mean[:, :, None], 0.0)
        std = jnp.sqrt((spread**2).sum(2) / jnp.maximum(count - 1, 1))
        out = jnp.where(std > adv.MIN_STD, out / (std + 1e-6), 0.0)
    return jnp.where(ok & (count > 1), out, 0.0).reshape(returns.shape)


def seat_returns(
    rewards: jax.Array, own: jax.Array, seats: jax.Array, num_turns: jax.Array
) -> jax.Array:
    """Returns [B, 2] of both seats of a zero-sum game.

    rewards [B, K]: those of seat 0, seat 1 earns minus them; own [B, K]: what counts for the seat
    of a turn alone, such as penalties; seats int32 [B, K].
    """
    played = jnp.arange(rewards.shape[1])[None] < num_turns[:, None]
    paid = jnp.where(played, rewards, 0.0).sum(1)
    mine = [jnp.where(played & (seats == seat), own, 0.0).sum(1) for seat in range(2)]
    return jnp.stack([paid + mine[0], mine[1] - paid], axis=1)
