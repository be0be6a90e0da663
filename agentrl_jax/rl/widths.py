"""Micro-batches that are only as wide as their longest row.

Shapes are static, so a program is compiled for a few widths. Rows are sorted by length, and each
micro-batch runs in the narrowest width that holds its trained tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.types import Batch

MULTIPLE = 8  # of columns


def menu(length: int, count: int) -> tuple[int, ...]:
    """Return up to `count` widths, evenly spaced up to length; multiples of 8 except the last."""
    steps = (-(-length * i // (count * MULTIPLE)) * MULTIPLE for i in range(1, count + 1))
    return tuple(sorted({min(width, length) for width in steps}))


def used(mask: jax.Array) -> jax.Array:
    """Count columns up to the last masked one, all that a causal model reads; int32 [B]."""
    return jnp.max(jnp.where(mask, jnp.arange(1, mask.shape[1] + 1)[None], 0), axis=1)


def sorted_rows(lengths: jax.Array, *, parts: int, unit: int) -> jax.Array:
    """Return the order of rows int32 [B] that gives parts of similar length.

    The i-th unit of `unit` rows goes to part i % parts. The longest row of a unit is its length.
    The first part gets the shortest units.
    """
    order = jnp.argsort(lengths.reshape(-1, unit).max(1))
    dealt = order.reshape(parts, -1).T.reshape(-1)
    return (dealt[:, None] * unit + jnp.arange(unit)[None]).reshape(-1)


def cut(rows: Sequence[Any], width: int) -> tuple:
    """Truncate every array [B, T] in rows, and the masks in Batch.extra, to `width` columns."""

    def columns(x):
        return x[:, :width] if x.ndim > 1 else x

    def one(part):
        if not isinstance(part, Batch):
            return jax.tree.map(columns, part)
        extra = {name: columns(x) if x.dtype == bool else x for name, x in part.extra.items()}
        return jax.tree.map(columns, part.replace(extra={})).replace(extra=extra)

    return tuple(map(one, rows))


def run_in_bucket(
    fn: Callable, params: Any, rows: Any, lengths: jax.Array, widths: tuple, *, cuts: bool = True
) -> Any:
    """Call fn(params, *rows) with rows cut to the smallest of the ascending widths that fits.

    With cuts=False the rows are not cut, and fn receives the width as its keyword `room`.
    """

    def at(width):
        if cuts:
            return lambda params, rows: fn(params, *cut(rows, width))
        return lambda params, rows: fn(params, *rows, room=width)

    branches = [at(width) for width in widths]
    index = jnp.searchsorted(jnp.asarray(widths), lengths.max())
    return jax.lax.switch(index, branches, params, rows)
