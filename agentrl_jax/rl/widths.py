"""Micro-batches as wide as their longest row, where rows are far shorter than their budget.

Shapes are static, so a program holds a few widths and each micro-batch runs in the narrowest that
holds what it trains. Rows are sorted by length first, so that like are together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.types import Batch

MULTIPLE = 8  # of columns


def menu(length: int, count: int) -> tuple[int, ...]:
    """At most `count` widths, evenly spaced up to length; all but the last are multiples of 8."""
    steps = (-(-length * i // (count * MULTIPLE)) * MULTIPLE for i in range(1, count + 1))
    return tuple(sorted({min(width, length) for width in steps}))


def used(mask: jax.Array) -> jax.Array:
    """Columns up to the last in the mask bool [B, T]: all that a causal model reads. int32 [B]."""
    return jnp.max(jnp.where(mask, jnp.arange(1, mask.shape[1] + 1)[None], 0), axis=1)


def sorted_rows(lengths: jax.Array, *, parts: int, unit: int) -> jax.Array:
    """Order of rows int32 [B] in which the i-th `unit` rows, dealt to part i % parts, are alike.

    Each unit counts with its longest row; the first part gets the shortest.
    """
    order = jnp.argsort(lengths.reshape(-1, unit).max(1))
    dealt = order.reshape(parts, -1).T.reshape(-1)
    return (dealt[:, None] * unit + jnp.arange(unit)[None]).reshape(-1)


def cut(rows: Sequence[Any], width: int) -> tuple:
    """The first columns of every array [B, T] among rows, and of the masks of Batch.extra."""

    def columns(x):
        return x[:, :width] if x.ndim > 1 else x

    def one(part):
        if not isinstance(part, Batch):
            return jax.tree.map(columns, part)
        extra = {name: columns(x) if x.dtype == bool else x for name, x in part.extra.items()}
        return jax.tree.map(columns, part.replace(extra={})).replace(extra=extra)

    return tuple(map(one, rows))


def at_width(
    fn: Callable, params: Any, rows: Any, lengths: jax.Array, widths: tuple, *, cuts: bool = True
) -> Any:
    """fn(params, *rows) of rows cut to the first of the ascending widths that holds the longest.

    Without cuts the rows are whole, and fn has the width as its keyword `room`.
    """

    def at(width):
        if cuts:
            return lambda params, rows: fn(params, *cut(rows, width))
        return lambda params, rows: fn(params, *rows, room=width)

    branches = [at(width) for width in widths]
    index = jnp.searchsorted(jnp.asarray(widths), lengths.max())
    return jax.lax.switch(index, branches, params, rows)
