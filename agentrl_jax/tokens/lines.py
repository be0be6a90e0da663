"""Known lines of text as token ids: a table on the device, and their concatenation by row numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class LineTable:
    """N lines of at most W tokens."""

    ids: jax.Array  # int32 [N, W]  -1 behind the end
    length: jax.Array  # int32 [N]


def build_line_table(
    tokenizer: Any, lines: list[str], *, extra_rows: list[list[int]] | None = None
) -> LineTable:
    """Table of the tokenised lines, followed by extra_rows, which are token ids already.

    Every line must end in a newline, and no two lines may tokenise otherwise side by side than
    apart: checked on a sample of pairs, and a ValueError names the first pair that does.
    """
    broken = [line for line in lines if line and not line.endswith('\n')]
    if broken:
        raise ValueError(f'a line must end in a newline: {broken[0]!r}')
    rows = tokenizer.encode_batch(lines)
    check_joins(tokenizer, lines, rows)
    rows = [*rows, *(extra_rows or [])]
    length = np.array([len(row) for row in rows], np.int32)
    ids = np.full((len(rows), max(int(length.max()), 1)), -1, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return LineTable(ids=jnp.asarray(ids), length=jnp.asarray(length))


def check_joins(tokenizer: Any, lines: list[str], rows: list[list[int]], pairs: int = 2000) -> None:
    """Raises if joining two sampled lines changes their tokens (a merge across the newline)."""
    rng = np.random.default_rng(0)
    left, right = rng.integers(len(lines), size=(2, pairs))
    joined = tokenizer.encode_batch([lines[a] + lines[b] for a, b in zip(left, right, strict=True)])
    for a, b, ids in zip(left, right, joined, strict=True):
        if ids != [*rows[a], *rows[b]]:
            raise ValueError(
                f'the tokenizer merges across lines: {lines[a]!r} + {lines[b]!r}; '
                'prompts of this environment cannot be built from a line table'
            )


def gather_lines(table: LineTable, rows: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array]:
    """Concatenation of the given rows (int32 [R], -1 = nothing): (tokens int32 [width], count).

    Tokens behind the count are -1; a count above width means that tokens were lost.
    """
    present = rows >= 0
    rows = jnp.maximum(rows, 0)
    length = jnp.where(present, table.length[rows], 0)
    start = jnp.cumsum(length) - length
    column = jnp.arange(table.ids.shape[1])[None]
    at = jnp.where(column < length[:, None], start[:, None] + column, width)
    tokens = jnp.full(width, -1, jnp.int32).at[at].set(table.ids[rows], mode='drop')
    return tokens, length.sum()
