"""Advantages: rewards belong to turns, advantages to action tokens.

Pure functions of arrays: [B] episodes, group-major; [B, K] turns; [B, T] tokens. Group statistics
include healthy members only: an episode with an environment fault does not affect the baselines of
its group. Returned values are 0 for unhealthy rows and off the mask.

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
