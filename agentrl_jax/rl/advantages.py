"""Advantages: rewards belong to turns, advantages to action tokens.

Pure functions of arrays: [B] episodes, group-major; [B, K] turns; [B, T] tokens. Recursions run
over masked tokens and skip everything else, so the number and content of observation tokens change
no advantage. Group statistics include healthy members only: an episode with an environment fault
does not affect the baselines of its group. Returned values are 0 for unhealthy rows and off the
mask.

Groups with nothing to compare: with group_size 1 the advantage is the return (mean 0, std 1). A
single healthy member of a larger group gets 0. Equal returns give exactly 0.

Returns are equal if they differ only by rounding (`equal`). `scale` is the sum of the magnitudes of
the terms of each return, which bounds its rounding; None: the magnitude of the return.
"""

import functools

import jax
import jax.numpy as jnp

from agentrl_jax.rl import masked

NORMS = ('std', 'mean', 'none')  # of `compare`, for loss.norm
# Relative tolerance. A float32 sum of n terms is off by at most n 2^-24 times the sum of their
# magnitudes, so two sums of the same 80 terms differ by less than this. Longer sums rarely exceed
# it, although their bound is larger.
ROUNDING = 1e-5


# ---- rounding ------------------------------------------------------------------------------------


def equal(
    x: jax.Array, mask: jax.Array, scale: jax.Array | None = None, axis: int | None = None
) -> jax.Array:
    """Whether max x - min x <= ROUNDING * max scale over mask, reduced over axis (None: all).

    True for fewer than two values, False if any value is not finite.
    """
    span = masked.masked_max(x, mask, axis) - masked.masked_min(x, mask, axis)
    size = masked.masked_max(jnp.abs(x) if scale is None else scale, mask, axis)
    span, size = jnp.maximum(span, 0.0), jnp.maximum(size, 0.0)  # -inf for an empty mask
    return (span <= ROUNDING * size) & jnp.isfinite(span)


def drop_rounding(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Set x to exactly 0 if it is within the rounding of terms of that scale."""
    return jnp.where(jnp.abs(x) <= ROUNDING * scale, 0.0, x)


# ---- between turns and tokens --------------------------------------------------------------------


def next_masked(x: jax.Array, mask: jax.Array, empty: float = 0.0) -> jax.Array:
    """x [B, T] at the next masked position after t, or `empty`."""
    length = mask.shape[1]
    here = jnp.where(mask, jnp.arange(length)[None], length)
    after = jnp.pad(here[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    index = jax.lax.cummin(after, axis=1, reverse=True)
    padded = jnp.pad(x, ((0, 0), (0, 1)), constant_values=empty)
    return jnp.take_along_axis(padded, index, axis=1)


def turn_ends(action_mask: jax.Array, turn: jax.Array) -> jax.Array:
    """Last action token of each turn, including turns with reward 0; bool [B, T]."""
    return action_mask & (next_masked(turn, action_mask, -1) != turn)


def episode_ends(action_mask: jax.Array) -> jax.Array:
    """Last action token of each row, bool [B, T]."""
    return turn_ends(action_mask, jnp.zeros_like(action_mask, jnp.int32))


def to_tokens(per_turn: jax.Array, turn: jax.Array, mask: jax.Array) -> jax.Array:
    """Copy the value of each turn to its masked tokens: [B, K] -> [B, T], 0 off the mask."""
    index = jnp.clip(turn, 0, per_turn.shape[1] - 1)
    return jnp.where(mask, jnp.take_along_axis(per_turn, index, axis=1), 0.0)


def per_turn(x: jax.Array, turn: jax.Array, mask: jax.Array, *, turns: int) -> jax.Array:
    """Sum of a token quantity over each turn: [B, T] -> [B, turns]."""
    rows = jnp.arange(x.shape[0])[:, None]
    index = jnp.where(mask, turn, turns)
    sums = jnp.zeros((x.shape[0], turns + 1), x.dtype).at[rows, index].add(jnp.where(mask, x, 0.0))
    return sums[:, :turns]


def place_on_turn_ends(rewards: jax.Array, action_mask: jax.Array, turn: jax.Array) -> jax.Array:
    """Place the reward of each turn on its last action token: [B, K] -> [B, T]."""
    return to_tokens(rewards, turn, turn_ends(action_mask, turn))


def place_on_episode_end(returns: jax.Array, action_mask: jax.Array) -> jax.Array:
    """Place the return of each episode on its last action token: [B] -> [B, T]."""
    return jnp.where(episode_ends(action_mask), returns[:, None], 0.0)


# ---- recursions over action tokens ---------------------------------------------------------------


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
    x: jax.Array,
    mask: jax.Array,
    over: jax.Array | None = None,
    scale: jax.Array | None = None,
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


# ---- comparisons inside a group ------------------------------------------------------------------


def _grouped(x: jax.Array, group_size: int) -> jax.Array:
    """[B, ...] -> [B / G, G, ...]."""
    return x.reshape(-1, group_size, *x.shape[1:])


def _compare(returns, healthy, scale, group_size):
    """Return (returns - group mean [P, G, ...], healthy count, unbiased std [P, 1, ...]).

    The smallest return of the group is subtracted first, to keep the precision of a small spread.
    Differences of equal returns are exactly 0.
    """
    scale = jnp.abs(returns) if scale is None else scale
    r, ok = _grouped(returns, group_size), _grouped(healthy, group_size)
    varied = ok & ~equal(r, ok, _grouped(scale, group_size), axis=1)[:, None]
    lowest = jnp.min(jnp.where(ok, r, jnp.inf), axis=1, keepdims=True)
    r = jnp.where(ok, r - lowest, 0.0)
    count = ok.sum(1, keepdims=True)
    centred = jnp.where(varied, r - r.sum(1, keepdims=True) / jnp.maximum(count, 1), 0.0)
    variance = (centred**2).sum(1, keepdims=True) / jnp.maximum(count - 1, 1)
    return centred, count, jnp.sqrt(variance)


def group_std(
    returns: jax.Array, healthy: jax.Array, *, group_size: int, scale: jax.Array | None = None
) -> jax.Array:
    """Unbiased std of the healthy members of each group, [B] -> [B / group_size].

    Exactly 0 for equal returns and for fewer than two members.
    """
    return _compare(returns, healthy, scale, group_size)[2][:, 0]


def group_mean(returns: jax.Array, healthy: jax.Array, *, group_size: int) -> jax.Array:
    """Mean of the healthy members, repeated for each row of the group; [B]."""
    r, ok = _grouped(returns, group_size), _grouped(healthy, group_size)
    mean = jnp.where(ok, r, 0.0).sum(1) / jnp.maximum(ok.sum(1), 1)
    return jnp.repeat(mean, group_size)


def compare(
    returns: jax.Array,
    healthy: jax.Array,
    *,
    group_size: int,
    norm: str,
    scale: jax.Array | None = None,
    eps: float = 1e-6,
) -> jax.Array:
    """Compare the returns of each group; [B] or [B, K], healthy of the same shape.

    none           R, also for groups of one
    mean           R - mean (Dr.GRPO, arXiv:2503.20783)
    std            (R - mean) / (std + eps), std unbiased (GRPO, arXiv:2402.03300)
    asym_clip      std, clipped to [-1, 3] (RAGEN)
    leave_one_out  R - mean of the *other* healthy members = (R - mean) n / (n - 1)
                   (arXiv:2402.14740)
    """
    if norm == 'none' or group_size == 1:
        return jnp.where(healthy, returns, 0.0)
    compared, count, std = _compare(returns, healthy, scale, group_size)
    if norm in ('std', 'asym_clip'):  # equal returns: the division would amplify their rounding
        compared = jnp.where(std == 0, 0.0, compared / (std + eps))
    if norm == 'asym_clip':
        compared = jnp.clip(compared, -1.0, 3.0)
    if norm == 'leave_one_out':
        compared = compared * count / jnp.maximum(count - 1, 1)
    return compared.reshape(returns.shape)


group_center = functools.partial(compare, norm='mean')
leave_one_out = functools.partial(compare, norm='leave_one_out')


def overlong_penalty(lengths: jax.Array, *, max_length: int, buffer: int, coef: float) -> jax.Array:
    """-coef clip((length - (max_length - buffer)) / buffer, 0, 1) (DAPO, arXiv:2503.14476 eq. 13).

    [B]. 0 up to max_length - buffer, -coef from max_length on. With buffer=0: -coef beyond
    max_length.
    """
    over = (lengths - (max_length - buffer)) / max(buffer, 1)
    return -coef * jnp.clip(over, 0.0, 1.0)
