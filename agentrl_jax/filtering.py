"""Which groups are trained on: StarPO-S and its successors, on raw returns, with static shapes.

A group's score is the spread of its raw returns (rewards and format penalties, before any
normalisation; ranking normalised returns is arbitrary, since they all have std 1). A rule turns
scores [P] into a keep mask bool [P]. The mask is used in one of two ways, which give the same loss:
as weights (row_mask: dropped rows stay and weigh 0) or compacting (select_top_groups: the rows of a
fixed number of groups, which saves the compute of the others). P = B / group_size groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax import advantages, masked

ZERO = 1e-10  # scores up to this are "zero" for include_zero=False


def group_scores(returns: jax.Array, healthy: jax.Array, *, group_size: int) -> jax.Array:
    """Unbiased std of the raw returns of each group's healthy members, 0 below two; [B] -> [P]."""
    return advantages.group_std(returns, healthy, group_size=group_size)


def row_mask(keep: jax.Array, *, group_size: int) -> jax.Array:
    """Keep mask of groups [P] as one of rows: bool [B]."""
    return jnp.repeat(keep, group_size)


def select_groups(scores: jax.Array, *, group_size: int, keep: int) -> jax.Array:
    """Rows of the `keep` groups with the largest scores, in batch order: int32 [keep * group_size].

    Ties go to the earlier group. Take them with rollout = tree.map(lambda x: x[rows], rollout).
    """
    groups = jnp.sort(jax.lax.top_k(scores, keep)[1])
    rows = groups[:, None] * group_size + jnp.arange(group_size)[None]
    return rows.reshape(-1).astype(jnp.int32)


def select_top_groups(
    returns: jax.Array, healthy: jax.Array, *, group_size: int, keep: int
) -> jax.Array:
    """StarPO-S, compacting: rows of the `keep` groups whose raw returns vary most."""
    scores = group_scores(returns, healthy, group_size=group_size)
    return select_groups(scores, group_size=group_size, keep=keep)


# ---- rules: scores [P] -> keep mask [P] ----------------------------------------------------------


def _rank(scores: jax.Array) -> jax.Array:
    """0 for the largest score, ties to the earlier group; int32 [P]."""
    return jnp.argsort(jnp.argsort(-scores, stable=True), stable=True)


def _by_rank(scores: jax.Array, keep_sorted: jax.Array) -> jax.Array:
    """A mask over the descending order put back into batch order."""
    return keep_sorted[_rank(scores)]


def keep_top_k(scores: jax.Array, *, keep: int) -> jax.Array:
    """The `keep` largest scores; pass -scores for the smallest."""
    return _rank(scores) < keep


def keep_top_p(
    scores: jax.Array, *, p: float, include_zero: bool = False, eps: float = 0.01
) -> jax.Array:
    """Largest scores until their sum reaches p * total - eps; p >= 1 keeps all (RAGEN-2, linear).

    Nothing is kept when no score is positive or the threshold is not: the step is to be skipped.
    """
    eligible = include_zero | (jnp.abs(scores) > ZERO)
    if p >= 1:
        return jnp.broadcast_to(eligible, scores.shape)
    ordered = -jnp.sort(-jnp.where(eligible, scores, 0.0))
    before = jnp.cumsum(ordered) - ordered
    keep = (before < p * ordered.sum() - eps) & (ordered > 0)
    return _by_rank(scores, keep)


def keep_top_p_softmax(scores: jax.Array, *, p: float, include_zero: bool = True) -> jax.Array:
    """Fewest groups whose softmax(scores) sums to p (RAGEN-2, softmax); at least one.

    Depends on the scale of the scores: small ones give nearly equal mass and keep nearly all.
    """
    eligible = include_zero | (jnp.abs(scores) > ZERO)
    mass = jax.nn.softmax(jnp.where(eligible, scores, -jnp.inf))
    mass = jnp.where(eligible, mass, 0.0)
    if p >= 1:
        return jnp.broadcast_to(eligible, scores.shape)
    order = jnp.argsort(-mass, stable=True)
    before = jnp.cumsum(mass[order]) - mass[order]
    keep = (before < p) & (mass[order] > 0)
    return jnp.zeros(scores.shape, bool).at[order].set(keep)


def keep_min_p(scores: jax.Array, *, p: float, include_zero: bool = False) -> jax.Array:
    """Scores of at least p times the largest."""
    eligible = include_zero | (jnp.abs(scores) > ZERO)
    return eligible & (scores >= p * scores.max())


def keep_percentile(scores: jax.Array, *, low: float, high: float) -> jax.Array:
    """Ranks round(low P) up to, not including, round(high P), counted from the largest score."""
    rank, groups = _rank(scores), scores.shape[0]
    return (rank >= round(low * groups)) & (rank < round(high * groups))


def keep_all(scores: jax.Array) -> jax.Array:
    """Every group."""
    return jnp.ones(scores.shape, bool)


def keep_varied(scores: jax.Array) -> jax.Array:
    """Groups whose members differ at all (DAPO's dynamic sampling)."""
    return scores > advantages.MIN_STD


RULES = {
    'all': keep_all,
    'varied': keep_varied,
    'top_k': keep_top_k,
    'top_p': keep_top_p,
    'top_p_softmax': keep_top_p_softmax,
    'min_p': keep_min_p,
    'percentile': keep_percentile,
}


def keep_within_groups(
    returns: jax.Array, healthy: jax.Array, *, group_size: int, keep: int
) -> jax.Array:
    """Per group the `keep` healthy members whose returns vary most: bool [B].

    The best set is always j smallest and keep - j largest for some j; all keep + 1 are compared.
    """
    r, ok = returns.reshape(-1, group_size), healthy.reshape(-1, group_size)
    order = jnp.argsort(jnp.where(ok, r, jnp.inf), axis=1, stable=True)
    r = jnp.take_along_axis(jnp.where(ok, r, 0.0), order, axis=1)[:, None]  # [P, 1, G] ascending
    count = ok.sum(1)[:, None, None]
    place = jnp.arange(group_size)[None, None]
    low = jnp.arange(keep + 1)[None, :, None]
    chosen = ((place < low) | (place >= count - (keep - low))) & (place < count)  # [P, keep + 1, G]
    r = jnp.broadcast_to(r, chosen.shape)
    spread = masked.masked_var(r, chosen, axis=2)
    best = jnp.take_along_axis(chosen, spread.argmax(1)[:, None, None], axis=1)[:, 0]
    back = jnp.take_along_axis(best, jnp.argsort(order, axis=1), axis=1)
    return back.reshape(-1) & healthy


def refill(
    held: Any, count: jax.Array, fresh: Any, keep: jax.Array, *, group_size: int
) -> tuple[Any, jax.Array]:
    """Puts the kept groups of `fresh` behind the `count` groups held; (held, count).

    held and fresh are pytrees of arrays with rows in front, held with room for a fixed number of
    groups: what does not fit is dropped. Dynamic sampling plays rollouts until count is full.
    """
    rows = jax.tree.leaves(held)[0].shape[0]
    slot = count + jnp.cumsum(keep) - 1  # place of each kept group
    slot = jnp.where(keep, slot, rows)  # out of range: dropped
    index = (slot[:, None] * group_size + jnp.arange(group_size)[None]).reshape(-1)
    held = jax.tree.map(lambda old, new: old.at[index].set(new, mode='drop'), held, fresh)
    return held, jnp.minimum(count + keep.sum(), rows // group_size).astype(jnp.int32)


# ---- soft forms and statistics -------------------------------------------------------------------


def soft_weights(scores: jax.Array, *, group_size: int) -> jax.Array:
    """std_g / (largest std + 1e-6), a factor of the advantages of each row; [P] -> [B]."""
    return jnp.repeat(scores / (scores.max() + 1e-6), group_size)


def kept_scale(kept_ratio: jax.Array, *, scaling: str) -> jax.Array:
    """Factor of the advantages for a filtered batch: 1 (none), kept ratio (linear), its root."""
    if scaling == 'none':
        return jnp.ones_like(kept_ratio)
    return {'linear': kept_ratio, 'sqrt': jnp.sqrt(kept_ratio)}[scaling]


def filter_metrics(scores: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
    """Statistics of the spreads before filtering and of what was kept; scores, keep [P]."""
    scores = scores.astype(jnp.float32)
    return {
        'filter/group_std': scores.mean(),
        'filter/group_std_max': scores.max(),
        'filter/group_std_min': scores.min(),
        'filter/group_std_kept': masked.masked_mean(scores, keep),
        'filter/zero_std_groups': (scores <= advantages.MIN_STD).mean(),
        'filter/kept_ratio': keep.mean(),
    }
