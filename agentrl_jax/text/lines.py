"""Lines of text that are known in advance: token ids by row number, joined on the device.

The tokens of a text are those of its lines one after another where the tokenizer merges nothing
across a newline. How the white space at the end of a line is split may still depend on what follows
it: GPT-2's rule (SmolLM2) takes all of a run of white space at the end of a text or in front of a
digit, all but its last character in front of anything else. Such lines have several rows in the
table, one for each kind of beginning that the tokenizer tells apart, and the device takes the one
that fits the next line. Which lines those are is tried when a table is built; where two lines side
by side are not the tokens of each, an error names them.

An observation may also be made of pieces, texts without a newline of which several make a row (a
cell, a digit). They must be the same tokens wherever they can occur: check_rows.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.tokens.tokenizer import Tokenizer

TRIED = 4000  # pairs of an ending and a beginning
END = 0  # kind of what follows the last line: a special token, or nothing
Ids = list[int]


@struct.dataclass
class LineTable:
    """N lines of at most W tokens, and M >= N rows that spell them."""

    ids: jax.Array  # int32 [M, W]  -1 after the end
    length: jax.Array  # int32 [M]
    kind: jax.Array | None = None  # int32 [N]  how a line begins; None: no line depends on it
    variant: jax.Array | None = None  # int32 [N, kinds]  the row that spells a line before a kind


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Texts that make up rows of several."""

    all: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()  # those that never begin a row


def build_line_table(
    tokenizer: Tokenizer,
    lines: list[str],
    *,
    extra_rows: list[Ids] | None = None,
    pieces: Pieces | None = None,
) -> LineTable:
    """Table of the tokenised lines, followed by extra_rows, which are token ids already.

    Every line that is no piece must be empty or end in a newline. An extra row may precede
    a line if its text ends in a newline, and follow one if it begins with a special token.
    """
    pieces = pieces or Pieces()
    broken = [text for text in lines if text and text not in pieces.all and text[-1] != '\n']
    if broken:
        raise ValueError(f'a line must end in a newline: {broken[0]!r}')
    extra_rows = list(extra_rows or [])
    rows = [*tokenizer.encode_batch(lines), *extra_rows]
    heads = [open_end(tokenizer, row) for row in extra_rows]
    heads = [head if head.endswith('\n') else '' for head in heads]  # no line follows the others
    starts = _shortest((line[:3], line) for line in lines if line not in pieces.inner)
    ends = [text for text in [*heads, *lines] if text.endswith('\n')]
    looking = looking_ahead(tokenizer, ends, list(starts.values()))
    if not looking:
        return _table(rows)
    kinds, examples = _kinds(tokenizer, list(looking.values()), starts)
    begins = [bool(line) and line not in pieces.inner for line in lines]
    kind = [kinds[line[:3]] if first else END for line, first in zip(lines, begins, strict=True)]
    kind += [END] * len(extra_rows)
    variant = [[i] * len(examples) for i in range(len(rows))]
    for i, text in enumerate([*lines, *heads]):
        if text[-4:] in looking:
            begun = rows[i][: len(rows[i]) - len(tokenizer.encode(text))]
            for k, example in list(enumerate(examples))[1:]:
                variant[i][k] = len(rows)
                rows.append([*begun, *in_front(tokenizer, text, example)])
    return _table(rows, kind=jnp.asarray(kind, jnp.int32), variant=jnp.asarray(variant, jnp.int32))


def check_rows(tokenizer: Tokenizer, lines: list[str], slots: list[range]) -> Pieces:
    """The pieces among the lines of an observation, whose slots say what may be where.

    A row ends with the first place at which every line ends in a newline. An error names two pieces
    of a row that are other tokens side by side than apart. Tried are pairs of all places of a row,
    for those between may be empty.
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
    apart = [tokenizer.encode_batch(list(texts)) for texts in zip(*pairs, strict=True)]
    for pair, ids, left, right in zip(pairs, joined, *apart, strict=True):
        if ids != [*left, *right]:
            raise ValueError(
                f'the tokenizer merges pieces of a row: {pair[0]!r} + {pair[1]!r} side by side are '
                'not the tokens of the two; separate them otherwise, or list whole rows as lines'
            )


def _table(rows: list[Ids], **kinds: jax.Array) -> LineTable:
    length = np.array([len(row) for row in rows], np.int32)
    ids = np.full((len(rows), max(int(length.max(initial=0)), 1)), -1, np.int32)
    ids[np.arange(ids.shape[1])[None] < length[:, None]] = [i for row in rows for i in row]
    return LineTable(ids=jnp.asarray(ids), length=jnp.asarray(length), **kinds)


def _shortest(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The shortest text of each name, without empty ones."""
    found: dict[str, str] = {}
    for name, text in named:
        if text and (name not in found or len(text) < len(found[name])):
            found[name] = text
    return found


def looking_ahead(tokenizer: Tokenizer, texts: list[str], starts: list[str]) -> dict[str, str]:
    """Texts whose tokens in front of some start are others than alone, by their last characters.

    Tried are texts of all endings with all starts; of more than TRIED such pairs, those with a
    start of each first character and TRIED more.
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
    """Ids of a text in front of a start; an error names the two where they are not apart."""
    joined, after = tokenizer.encode(text + start), tokenizer.encode(start)
    ids = joined[: len(joined) - len(after)]
    if joined[len(ids) :] != after or tokenizer.decode_bytes(ids) != text.encode():
        raise ValueError(
            f'the tokenizer merges across lines: {text!r} + {start!r} side by side are not the '
            'tokens of the two; no prompt can be built from a table of such lines'
        )
    return ids


def in_front_of_all(tokenizer: Tokenizer, text: str, starts: list[str]) -> Ids:
    """Ids of a text that must be the same in front of every start."""
    starts = list(_shortest((start[:3], start) for start in starts).values())
    spelled = [in_front(tokenizer, text, start) for start in starts]
    for start, ids in zip(starts, spelled, strict=True):
        if ids != spelled[0]:
            raise ValueError(
                f'the tokens of {text!r} in front of {starts[0]!r} are not those in front of '
                f'{start!r}; the prompt must be worded otherwise'
            )
    return spelled[0] if starts else tokenizer.encode(text)


def _kinds(
    tokenizer: Tokenizer, looking: list[str], starts: dict[str, str]
) -> tuple[dict[str, int], list[str]]:
    """(kind of each start, an example of each kind): starts before which all texts are the same."""
    examples = {tuple(map(tuple, tokenizer.encode_batch(looking))): ''}
    kinds = {}
    for name, start in starts.items():
        spelled = tuple(tuple(in_front(tokenizer, text, start)) for text in looking)
        examples.setdefault(spelled, start)
        kinds[name] = list(examples).index(spelled)
    return kinds, list(examples.values())


def open_end(tokenizer: Tokenizer, row: Ids) -> str:
    """Text after the last special token of a row of ids; a line may follow it directly."""
    pieces = tokenizer.token_bytes()
    cuts = [i for i, token in enumerate(row) if not pieces[token]]
    return tokenizer.decode(row[cuts[-1] + 1 :] if cuts else row)


def longest(table: LineTable) -> np.ndarray:
    """The most tokens that each line can have, whatever follows it: int [N]."""
    length = np.asarray(table.length)
    return length if table.variant is None else length[np.asarray(table.variant)].max(axis=1)


def in_context(table: LineTable, lines: jax.Array) -> jax.Array:
    """The rows that spell lines (int32 [R], -1 = nothing) as they follow one another."""
    if table.variant is None:
        return lines
    there = (lines >= 0) & (table.length[jnp.maximum(lines, 0)] > 0)
    count = lines.shape[0]
    at = jnp.where(there, jnp.arange(count), count)
    following = jax.lax.cummin(jnp.append(at[1:], count), reverse=True)
    # the last line is followed by END, as before an extra row that begins with a special token
    after = jnp.append(lines, -1)[following]
    kind = jnp.where(after >= 0, table.kind[jnp.maximum(after, 0)], END)
    return jnp.where(lines >= 0, table.variant[jnp.maximum(lines, 0), kind], -1)


def lengths(table: LineTable, lines: jax.Array) -> jax.Array:
    """Tokens of each line (int32 [R], -1 = nothing) as they follow one another."""
    rows = in_context(table, lines)
    return jnp.where(rows >= 0, table.length[jnp.maximum(rows, 0)], 0)


def gather_lines(table: LineTable, rows: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array]:
    """Concatenation of the given rows (int32 [R], -1 = nothing): (tokens int32 [width], count).

    Tokens past the count are -1; a count above width means that tokens were lost.
    """
    rows = in_context(table, rows)
    length = jnp.where(rows >= 0, table.length[jnp.maximum(rows, 0)], 0)
    end = jnp.cumsum(length)
    place = jnp.arange(width)
    slot = jnp.minimum(jnp.sum(end[None] <= place[:, None], axis=1), rows.shape[0] - 1)
    column = jnp.minimum(place - (end - length)[slot], table.ids.shape[1] - 1)
    return jnp.where(place < end[-1], table.ids[rows[slot], column], -1), end[-1]
