"""Lines of text that are known in advance: token ids by row number, joined on the device.

The tokens of a text are those of its lines one after another if the tokenizer merges nothing across
a newline. That holds for Qwen2.5 and for the project's SentencePiece model unless a line begins
with white space, and is checked when a table is built.
"""

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

    Every line must be empty or end in a newline, and no two may tokenise otherwise side by side
    than apart (see check_joins); the same holds for extra rows whose text ends in a newline.
    """
    broken = [line for line in lines if line and not line.endswith('\n')]
    if broken:
        raise ValueError(f'a line must end in a newline: {broken[0]!r}')
    extra_rows = list(extra_rows or [])
    encoded = tokenizer.encode_batch(lines)
    ends = [_open_end(tokenizer, row) for row in extra_rows]
    check_joins(tokenizer, lines, [text for text in ends if text.endswith('\n')])
    rows = [*encoded, *extra_rows]
    length = np.array([len(row) for row in rows], np.int32)
    ids = np.full((len(rows), max(int(length.max(initial=0)), 1)), -1, np.int32)
    ids[np.arange(ids.shape[1])[None] < length[:, None]] = [i for row in rows for i in row]
    return LineTable(ids=jnp.asarray(ids), length=jnp.asarray(length))


def check_joins(tokenizer: Any, lines: list[str], heads: list[str], *, most: int = 4000) -> None:
    """Raises if joining two texts at a newline changes their tokens, naming the pair.

    Tried are `most` pairs of (lines or heads, lines) that differ in how the left one ends and the
    right one begins, which is what a merge depends on; heads are texts in front of a line.
    """
    tails = {text[-4:]: text for text in [*heads, *lines] if text}
    starts = {text[:3]: text for text in lines if text}
    pairs = [(left, right) for left in tails.values() for right in starts.values()]
    if len(pairs) > most:
        chosen = np.random.default_rng(0).choice(len(pairs), most, replace=False)
        pairs = [pairs[i] for i in chosen]
    joined = tokenizer.encode_batch([left + right for left, right in pairs])
    lefts = tokenizer.encode_batch([left for left, _ in pairs])
    rights = tokenizer.encode_batch([right for _, right in pairs])
    for pair, ids, left, right in zip(pairs, joined, lefts, rights, strict=True):
        if ids != [*left, *right]:
            raise ValueError(
                f'the tokenizer merges across lines: {pair[0]!r} + {pair[1]!r} side by side are '
                'not the tokens of the two; no prompt can be built from a table of such lines'
            )


def _open_end(tokenizer: Any, row: list[int]) -> str:
    """Text behind the last special token of a row of ids; a line may follow it directly."""
    pieces = tokenizer.token_bytes()
    cuts = [i for i, token in enumerate(row) if not pieces[token]]
    return tokenizer.decode(row[cuts[-1] + 1 :] if cuts else row)


def gather_lines(table: LineTable, rows: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array]:
    """Concatenation of the given rows (int32 [R], -1 = nothing): (tokens int32 [width], count).

    Tokens behind the count are -1; a count above width means that tokens were lost.
    """
    length = jnp.where(rows >= 0, table.length[jnp.maximum(rows, 0)], 0)
    end = jnp.cumsum(length)
    place = jnp.arange(width)
    slot = jnp.minimum(jnp.sum(end[None] <= place[:, None], axis=1), rows.shape[0] - 1)
    column = jnp.minimum(place - (end - length)[slot], table.ids.shape[1] - 1)
    return jnp.where(place < end[-1], table.ids[rows[slot], column], -1), end[-1]
