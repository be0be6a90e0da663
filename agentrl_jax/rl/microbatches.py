"""Micro-batches: the rows of an optimiser step in slices, each only as wide as its longest row.

Shapes are static, so a program is compiled for a few widths. Rows are sorted by length, and each
slice runs in the narrowest width that holds its trained tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.rl.metrics import MAXIMA
from agentrl_jax.types import Batch, Params

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


def split(batch: Any, parts: int, sharding: NamedSharding | None, unit: int = 1) -> Any:
    """Split rows [B, ...] into [parts, B / parts, ...]; the i-th unit goes to part i % parts.

    Each part then has rows from every device's block, so splitting moves no data between devices.
    """

    def one(x):
        rows = x.shape[0]
        x = x.reshape(rows // (parts * unit), parts, unit, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(parts, rows // parts, *x.shape[3:])
        if sharding is None:
            return x
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(sharding.mesh, P(None, *sharding.spec))
        )

    return jax.tree.map(one, batch)


def sort_trained_first(rows: jax.Array, mask: jax.Array, parts: int, unit: int = 1) -> jax.Array:
    """Reorder the rows int32 [n] of a mini-batch, unit by unit, so that units with a trained token
    fill the first slices of `split`."""
    trains, units = mask[rows].any(1).reshape(-1, unit).any(1), rows.reshape(-1, unit)
    order = units[jnp.argsort(~trains, stable=True)]
    return order.reshape(parts, -1, unit).swapaxes(0, 1).reshape(-1)


class Slices(NamedTuple):
    """How the rows of an optimiser step are split into micro-batches."""

    parts: int
    sharding: NamedSharding | None
    widths: int = 1  # number of compiled widths
    unit: int = 1  # adjacent rows that stay together
    sparse: bool = False  # skip slices in which the loss reads no token
    rest_of: Callable | None = None  # ModelFns.rest, for units whose rows share a prefix

    @classmethod
    def of(cls, settings: UpdateSettings, fns: ModelFns) -> 'Slices':
        batch, parts = settings.batch, settings.microbatches
        rest_of = fns.rest if batch.prefix_rows > 1 else None
        layout, sparse = settings.layout, settings.sparse
        return cls(parts, layout, batch.widths, batch.prefix_rows, sparse, rest_of)


def accumulate(
    loss_fn: Callable, params: Params, rows: Any, mask: jax.Array, slices: Slices
) -> tuple[tuple[jax.Array, dict], Params]:
    """Sum loss_fn(params, *rows) over slices of the rows; return ((loss, metric sums), gradient).

    mask bool [B, T]: the tokens that the loss reads. With more than one width, a slice is cut after
    its last token in mask. With shared prefixes loss_fn gets the keyword `room` instead: columns
    for the rest of a row after the prefix of its unit. rows[0] is a Batch.
    """
    parts, sharding, widths, unit, sparse, rest_of = slices
    value_and_grad = of_rows = jax.value_and_grad(loss_fn, has_aux=True)
    if sparse or widths > 1:
        needed = lengths = used(mask)
        if rest_of is not None:
            model_inputs = rows[0].tokens, rows[0].attention_mask
            needed = rest_of(*model_inputs, lengths, unit)
        rows, every = (*rows, lengths, needed), menu(mask.shape[1], widths)
        if widths > 1:
            order = sorted_rows(rows[-1], parts=parts, unit=unit)
            rows = jax.tree.map(lambda x: x[order], rows)

        def value_and_grad(params, *rows):
            return run_in_bucket(of_rows, params, rows[:-2], rows[-1], every, cuts=rest_of is None)

    if parts == 1:
        return value_and_grad(params, *rows)
    slices_of_rows = split(rows, parts, sharding, unit)

    def add(carry, part):
        (loss, sums), grads = value_and_grad(params, *part)
        (total, all_sums), all_grads = carry
        grads = jax.tree.map(jnp.add, all_grads, grads)
        total = total + loss
        reduce = {name: jnp.maximum if name in MAXIMA else jnp.add for name in sums}
        return (total, {name: reduce[name](all_sums[name], sums[name]) for name in sums}), grads

    def body(carry, part):
        if not sparse:
            return add(carry, part), None
        has_tokens = part[-2].any()  # any nonzero length
        return jax.lax.cond(has_tokens, add, lambda carry, part: carry, carry, part), None

    first = jax.tree.map(lambda x: x[0], slices_of_rows)
    shapes = jax.eval_shape(value_and_grad, params, *first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zeros, slices_of_rows)[0]
