"""Tables of text lines that are known in advance: token ids by row, joined on the device.

The tokens of a text are the concatenated tokens of its lines if the tokenizer does not merge across
newlines. However, the tokens of white space at the end of a line may depend on the next line.
GPT-2's rule (SmolLM2) takes a full run of white space at the end of a text or in front of a digit,
but leaves its last character in front of anything else. These lines have several rows in the table,
one per kind of next line, and the device selects the row that fits. build_line_table finds them by
trial, and raises an error with the two lines if no rows can keep them separate.

An observation may also consist of pieces, several of which form a row: texts without a newline,
such as a cell or a digit. Their tokens must be the same wherever they can occur (check_rows).
"""

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.tokens.tokenizer import Tokenizer

TRIED = 4000  # maximum number of (end, start) pairs to try
END = 0  # kind of the end of a text: a special token or nothing follows
Ids = list[int]


@struct.dataclass
class LineTable:
    """N lines of up to W tokens, and M >= N rows that spell them."""

    ids: jax.Array  # int32 [M, W]  -1 after the end
    length: jax.Array  # int32 [M]
    kind: jax.Array | None = None  # int32 [N]  kind of a line's start; None: irrelevant
    variant: jax.Array | None = None  # int32 [N, kinds]  the row that spells a line before a kind


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Texts that form rows together with other texts."""

    all: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()  # pieces that are never the first of a row


def build_line_table(
    tokenizer: Tokenizer,
    lines: list[str],
    *,
    extra_rows: list[Ids] | None = None,
    pieces: Pieces | None = None,
) -> LineTable:
    """Build a table of the tokenised lines, followed by extra_rows of token ids.

    Every line that is not a piece must be empty or end in a newline. An extra row may precede a
    line if its text ends in a newline, and follow a line if it starts with a special token.
    """
    pieces = pieces or Pieces()
    broken = [text for text in lines if text and text not in pieces.all and text[-1] != '\n']
    if broken:
        raise ValueError(f'a line must end in a newline: {broken[0]!r}')
    extra_rows = list(extra_rows or [])
    rows = [*tokenizer.encode_batch(lines), *extra_rows]
    heads = [trailing_text(tokenizer, row) for row in extra_rows]
    heads = [head if head.endswith('\n') else '' for head in heads]  # '': no line can follow
    starts = _shortest((line[:3], line) for line in lines if line not in pieces.inner)
    ends = [text for text in [*heads, *lines] if text.endswith('\n')]
    looking = context_dependent(tokenizer, ends, list(starts.values()))
    if not looking:
        return _table(rows)
    kinds, examples = _kinds(tokenizer, list(looking.values()), starts)
    is_start = [bool(line) and line not in pieces.inner for line in lines]
    kind = [kinds[line[:3]] if first else END for line, first in zip(lines, is_start, strict=True)]
    kind += [END] * len(extra_rows)
    variant = [[i] * len(examples) for i in range(len(rows))]
    for i, text in enumerate([*lines, *heads]):
        if text[-4:] in looking:
            prefix = rows[i][: len(rows[i]) - len(tokenizer.encode(text))]
            for k, example in list(enumerate(examples))[1:]:
                variant[i][k] = len(rows)
                rows.append([*prefix, *in_front(tokenizer, text, example)])
    return _table(rows, kind=jnp.asarray(kind, jnp.int32), variant=jnp.asarray(variant, jnp.int32))


def check_rows(tokenizer: Tokenizer, lines: list[str], slots: list[range]) -> Pieces:
    """Return the pieces among the lines of an observation; slots: possible lines per position.

    A row ends at the first position with a newline at the end of all lines. Raises ValueError if
    two pieces of a row have other tokens together than separately. All pairs of positions in a row
    are tried, because the pieces between them may be empty.
    """
    rows: list[list[range]] = [[]]
    for slot in slots:
        rows[-1].append(slot)
        if all(lines[i].endswith('\n') for i in slot):
            rows.append([])
    if rows.pop():
        raise ValueError(f'the last line of an observation must end in a newline: {slots[-1]}')
    rows = [row for row in rows if len(row) > 1]
    pairs = {pair: None for row in rows for pair in itertools.combinations(row, 2)}
    for left, right in pairs:
        _check_pieces(tokenizer, [lines[i] for i in left], [lines[i] for i in right])
    begin = {lines[i] for row in rows for i in row[0]}
    inner = {lines[i] for row in rows for slot in row[1:] for i in slot}
    return Pieces(frozenset(begin | inner), frozenset(inner - begin))


def _check_pieces(tokenizer: Tokenizer, lefts: list[str], rights: list[str]) -> None:
    pairs = list(itertools.product(lefts, rights))
    if len(pairs) > TRIED:
        drawn = np.random.default_rng(0).choice(len(pairs), TRIED, replace=False)
        pairs = [pairs[i] for i in drawn]
    joined = tokenizer.encode_batch([left + right for left, right in pairs])
    separate = [tokenizer.encode_batch(list(texts)) for texts in zip(*pairs, strict=True)]
    for pair, ids, left, right in zip(pairs, joined, *separate, strict=True):
        if ids != [*left, *right]:
            raise ValueError(
                f'the tokenizer merges pieces of a row: {pair[0]!r} + {pair[1]!r} has other tokens '
                'than the two pieces; use another separator, or list full rows as lines'
            )


def _table(rows: list[Ids], **kinds: jax.Array) -> LineTable:
    length = np.array([len(row) for row in rows], np.int32)
    ids = np.full((len(rows), max(int(length.max(initial=0)), 1)), -1, np.int32)
    ids[np.arange(ids.shape[1])[None] < length[:, None]] = [i for row in rows for i in row]
    return LineTable(ids=jnp.asarray(ids), length=jnp.asarray(length), **kinds)


def _shortest(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the shortest non-empty text of each name."""
    shortest: dict[str, str] = {}
    for name, text in named:
        if text and (name not in shortest or len(text) < len(shortest[name])):
            shortest[name] = text
    return shortest


def context_dependent(tokenizer: Tokenizer, texts: list[str], starts: list[str]) -> dict[str, str]:
    """Return texts with other tokens in front of some start than alone, by their last characters.

    Tries all pairs of an ending and a start. If there are more than TRIED, it tries a start for
    each first character and a random sample of TRIED pairs.
    """
    tails = list(_shortest((text[-4:], text) for text in texts).values())
    pairs = list(itertools.product(tails, starts))
    if len(pairs) > TRIED:
        drawn = np.random.default_rng(0).choice(len(pairs), TRIED, replace=False)
        first = _shortest((start[0], start) for start in starts).values()
        pairs = [*itertools.product(tails, first), *(pairs[i] for i in drawn)]
    alone = {text: None for pair in pairs for text in pair}
    alone = dict(zip(alone, tokenizer.encode_batch(list(alone)), strict=True))
    joined = tokenizer.encode_batch([left + right for left, right in pairs])
    return {
        left[-4:]: left
        for (left, right), ids in zip(pairs, joined, strict=True)
        if ids != [*alone[left], *alone[right]]
    }


def in_front(tokenizer: Tokenizer, text: str, start: str) -> Ids:
    """Return the ids of a text in front of a start; ValueError if tokens span both texts."""
    joined, after = tokenizer.encode(text + start), tokenizer.encode(start)
    ids = joined[: len(joined) - len(after)]
    if joined[len(ids) :] != after or tokenizer.decode_bytes(ids) != text.encode():
        raise ValueError(
            f'the tokenizer merges across lines: {text!r} + {start!r} has other tokens than the '
            'two lines, so no line table can be built'
        )
    return ids


def in_front_of_all(tokenizer: Tokenizer, text: str, starts: list[str]) -> Ids:
    """Return the ids of a text; ValueError if they depend on which start follows."""
    starts = list(_shortest((start[:3], start) for start in starts).values())
    spelled = [in_front(tokenizer, text, start) for start in starts]
    for start, ids in zip(starts, spelled, strict=True):
        if ids != spelled[0]:
            raise ValueError(
                f'the tokens of {text!r} differ in front of {starts[0]!r} and {start!r}; the '
                'prompt needs another wording'
            )
    return spelled[0] if starts else tokenizer.encode(text)


def _kinds(
    tokenizer: Tokenizer, looking: list[str], starts: dict[str, str]
) -> tuple[dict[str, int], list[str]]:
    """Return (kind of each start, an example of each kind).

    All texts have the same tokens in front of the starts of a kind.
    """
    examples = {tuple(map(tuple, tokenizer.encode_batch(looking))): ''}
    kinds = {}
    for name, start in starts.items():
        spelled = tuple(tuple(in_front(tokenizer, text, start)) for text in looking)
        examples.setdefault(spelled, start)
        kinds[name] = list(examples).index(spelled)
    return kinds, list(examples.values())


def trailing_text(tokenizer: Tokenizer, row: Ids) -> str:
    """Return the text after the last special token of a row, directly in front of the next line."""
    pieces = tokenizer.token_bytes()
    cuts = [i for i, token in enumerate(row) if not pieces[token]]
    return tokenizer.decode(row[cuts[-1] + 1 :] if cuts else row)


def longest(table: LineTable) -> np.ndarray:
    """Return the maximum number of tokens of each line over all next lines, int [N]."""
    length = np.asarray(table.length)
    return length if table.variant is None else length[np.asarray(table.variant)].max(axis=1)


def in_context(table: LineTable, lines: jax.Array) -> jax.Array:
    """Return the rows that spell a sequence of lines (int32 [R], -1 = nothing)."""
    if table.variant is None:
        return lines
    there = (lines >= 0) & (table.length[jnp.maximum(lines, 0)] > 0)
    count = lines.shape[0]
    at = jnp.where(there, jnp.arange(count), count)
    following = jax.lax.cummin(jnp.append(at[1:], count), reverse=True)
    # END follows the last line, and also a line in front of an extra row with a special token.
    after = jnp.append(lines, -1)[following]
    kind = jnp.where(after >= 0, table.kind[jnp.maximum(after, 0)], END)
    return jnp.where(lines >= 0, table.variant[jnp.maximum(lines, 0), kind], -1)


def lengths(table: LineTable, lines: jax.Array) -> jax.Array:
    """Return the number of tokens of each line of a sequence (int32 [R], -1 = nothing)."""
    rows = in_context(table, lines)
    return jnp.where(rows >= 0, table.length[jnp.maximum(rows, 0)], 0)


def gather_lines(table: LineTable, rows: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array]:
    """Concatenate lines (int32 [R], -1 = nothing): (tokens int32 [width], count).

    Tokens past the count are -1. A count above width means that tokens were lost.
    """
    rows = in_context(table, rows)
    length = jnp.where(rows >= 0, table.length[jnp.maximum(rows, 0)], 0)
    end = jnp.cumsum(length)
    place = jnp.arange(width)
    slot = jnp.minimum(jnp.sum(end[None] <= place[:, None], axis=1), rows.shape[0] - 1)
    column = jnp.minimum(place - (end - length)[slot], table.ids.shape[1] - 1)
    return jnp.where(place < end[-1], table.ids[rows[slot], column], -1), end[-1]
