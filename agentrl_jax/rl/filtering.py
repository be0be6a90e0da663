"""Group filters: StarPO-S and its successors, on raw returns, with static shapes.

A group's score is the spread of its raw returns: rewards and format penalties before any
normalisation. Normalised returns all have std 1 and cannot be ranked. The score is exactly 0 if
returns differ only by rounding (advantages.equal). A rule turns scores [P] of P = B / group_size
groups into a keep mask bool [P]. The mask is applied in one of two ways with the same loss: as
weights (dropped rows stay with weight 0), or by compacting to the rows of a fixed number of groups,
which saves the compute of the dropped ones.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages, masked
from agentrl_jax.settings.marks import POSITIVE_FRACTION, SHARE, ZERO, NameIn, Neutral, OnlyIf
from agentrl_jax.types import Rollout

# ---- rules: scores [P] -> keep mask [P] ----------------------------------------------------------

TOP_P_EPS = 0.01  # top_p: tolerance of the threshold (RAGEN-2)


def _rank(scores: jax.Array) -> jax.Array:
    """Rank of each score, 0 for the largest; ties go to the earlier group; int32 [P]."""
    return jnp.argsort(jnp.argsort(-scores, stable=True), stable=True)


def keep_top_k(scores: jax.Array, *, keep: int, smallest: bool = False) -> jax.Array:
    """Keep the `keep` largest (or smallest) scores; ties go to the earlier group."""
    return _rank(-scores if smallest else scores) < keep


def keep_top_p(scores: jax.Array, *, p: float) -> jax.Array:
    """Keep the largest positive scores until their sum reaches p * total - .01 (RAGEN-2, linear).

    p >= 1 keeps all positive scores. Keeps nothing if no score or the threshold is not positive;
    the step must then be skipped.
    """
    if p >= 1:
        return scores > 0
    ordered = -jnp.sort(-jnp.where(scores > 0, scores, 0.0))
    before = jnp.cumsum(ordered) - ordered
    keep = (before < p * ordered.sum() - TOP_P_EPS) & (ordered > 0)
    return keep[_rank(scores)]


def keep_top_p_softmax(scores: jax.Array, *, p: float) -> jax.Array:
    """Keep the fewest groups with a softmax(scores) sum of p (RAGEN-2, softmax); at least one.

    Depends on the scale of the scores: small scores have nearly equal mass, so nearly all are kept.
    """
    mass = jax.nn.softmax(scores)
    if p >= 1:
        return jnp.ones(scores.shape, bool)
    order = jnp.argsort(-mass, stable=True)
    before = jnp.cumsum(mass[order]) - mass[order]
    keep = (before < p) & (mass[order] > 0)
    return jnp.zeros(scores.shape, bool).at[order].set(keep)


def keep_min_p(scores: jax.Array, *, p: float) -> jax.Array:
    """Keep positive scores of at least p times the largest."""
    return (scores > 0) & (scores >= p * scores.max())


RULES = {
    'all': lambda scores: jnp.ones(scores.shape, bool),
    'varied': lambda scores: scores > 0,  # any spread (DAPO's dynamic sampling)
    'top_k': keep_top_k,
    'top_p': keep_top_p,
    'top_p_softmax': keep_top_p_softmax,
    'min_p': keep_min_p,
}


def filter_metrics(scores: jax.Array, keep: jax.Array) -> dict[str, jax.Array]:
    """Metrics of the kept groups; scores float32 [P], keep bool [P, group_size]."""
    return {
        'filter/kept': keep.mean(),
        'filter/group_std_kept': masked.masked_mean(scores.astype(jnp.float32), keep.any(1)),
        'filter/group_std_max': scores.max().astype(jnp.float32),
    }


def share(part: float, whole: int) -> int:
    """Return RAGEN's int(part * whole), at least 1."""
    return max(int(part * whole + 1e-9), 1)


def by(default: float, *rules: str) -> tuple[Neutral, OnlyIf]:
    """Return the marks of a field that only some filter rules read."""
    return Neutral(default), OnlyIf(lambda f: f.rule in rules, f'filter.rule={" or ".join(rules)}')


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which groups train, by the std of their raw returns."""

    AT = 'filter.'
    rule: Annotated[str, NameIn(RULES)] = 'top_k'  # top_k (a share of the groups; the rest is left
    # out of the update, while other rules give dropped groups weight 0), top_p and top_p_softmax (a
    # share of the summed spread), min_p, varied (all groups with a spread: DAPO), all
    keep: Annotated[float, POSITIVE_FRACTION, *by(1.0, 'top_k')] = 1.0
    # top_k: share of the groups to keep
    smallest: Annotated[bool, *by(False, 'top_k')] = False  # top_k: keep the groups with the
    # smallest spread instead
    p: Annotated[float, SHARE, *by(0.9, 'top_p', 'top_p_softmax', 'min_p')] = 0.9  # share of the
    # summed spread; min_p: share of the largest spread
    refill: Annotated[
        int,
        ZERO,
        Neutral(0),
        OnlyIf(lambda f: f.drops_groups, 'a filter.rule that drops groups, such as varied'),
    ] = 0  # dynamic sampling: maximum number of extra rollouts, on other levels, to fill the batch
    # with kept groups; 0 = off
    max_empty: Annotated[int, ZERO] = 5  # stop the run after this many steps in a row that keep
    # nothing; 0 = never

    @property
    def drops_groups(self) -> bool:
        """Whether the rule can drop groups."""
        return self.rule != 'all' and not (self.rule == 'top_k' and self.keep == 1)

    def kept(self, groups: int) -> int:
        """Number of groups in an update: the kept ones if their number is fixed, else all."""
        compacts = self.rule == 'top_k' and not self.refill
        return share(self.keep, groups) if compacts else groups

    def order(self, groups: int) -> str:
        """Return how `select` orders rows.

        all: unchanged; compact: the rows of the kept groups, whose number is fixed; kept_first:
        kept groups first, so that optimiser steps without a kept row are last and are skipped.
        """
        if self.refill or not self.drops_groups:
            return 'all'
        return 'compact' if self.kept(groups) < groups else 'kept_first'

    def keep_rows(
        self, rollout: Rollout, *, groups: int, group_size: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return (scores float32 [P], rows that the rule keeps bool [B])."""
        scale = rollout.magnitudes.returns
        scores = advantages.group_std(
            rollout.returns, rollout.healthy, group_size=group_size, scale=scale
        )
        settings = {
            'top_k': dict(keep=share(self.keep, groups), smallest=self.smallest),
            **dict.fromkeys(('top_p', 'top_p_softmax', 'min_p'), dict(p=self.p)),
        }
        keep = RULES[self.rule](scores, **settings.get(self.rule, {}))
        return scores, jnp.repeat(keep, group_size)

    def select(
        self, rollout: Rollout, *, groups: int, group_size: int
    ) -> tuple[Rollout, jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return (rollout [b], its row indices int32 [b], rows to train on bool [b], metrics).

        After a refill the rollout holds only kept groups.
        """
        rule = Filter('all') if self.refill else self
        scores, keep = rule.keep_rows(rollout, groups=groups, group_size=group_size)
        metrics = filter_metrics(scores, keep.reshape(-1, group_size))
        order, rows = self.order(groups), jnp.arange(keep.shape[0], dtype=jnp.int32)
        if order == 'compact':
            rows = jnp.nonzero(keep, size=self.kept(groups) * group_size)[0].astype(jnp.int32)
        elif order == 'kept_first':
            rows = jnp.argsort(~keep, stable=True).astype(jnp.int32)
        if order != 'all':
            rollout = jax.tree.map(lambda x: x[rows], rollout)
        return rollout, rows, keep[rows], metrics
