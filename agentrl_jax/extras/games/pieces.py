"""Observations in pieces: cells of boards, digits of numbers, legal actions.

Some rows have too many values to list each as a line (six cells of eighteen kinds: 34 million).
Their environments list the pieces of a row instead. A piece is a text without a newline, or ends a
row. An observation is a list of piece numbers, made on the device (see TextEnvironment.line_ids).
Building a prompt checks that the tokens of a row are those of its pieces (text.lines).

A part of an observation has two methods. `places` returns the pieces of each place, `index` maps a
value to the piece at each place, -1 = none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Grid:
    """Symbols in rows and columns; the value is int [rows, columns]."""

    symbols: tuple[str, ...]  # the first one is an empty cell
    rows: int
    columns: int  # at least 2
    blank: str = ' '  # separator
    trimmed: bool = False  # omit empty rows at the top, except the last row

    def places(self) -> list[tuple[str, ...]]:
        inner = tuple(f'{self.blank}{symbol}' for symbol in self.symbols)
        last = tuple(f'{piece}\n' for piece in inner)
        return [self.symbols, *[inner] * (self.columns - 2), last] * self.rows

    def index(self, values: jax.Array) -> jax.Array:
        cells = jnp.asarray(values, jnp.int32).reshape(self.rows, self.columns)
        if self.trimmed:
            visible = (jnp.cumsum(jnp.any(cells > 0, 1)) > 0) | (
                jnp.arange(self.rows) == self.rows - 1
            )
            cells = jnp.where(visible[:, None], cells, -1)
        return cells.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Number:
    """A row with a number, such as 'Chips: 12'; the value is int [] in [0, 10 ** digits)."""

    before: str
    digits: int

    def places(self) -> list[tuple[str, ...]]:
        digits = tuple('0123456789')
        last = tuple(f'{digit}\n' for digit in digits)
        return [(self.before,), *[digits] * (self.digits - 1), last]

    def index(self, values: jax.Array) -> jax.Array:
        powers = 10 ** np.arange(self.digits)[::-1]
        visible = (values >= powers) | (powers == 1)
        digits = jnp.where(visible, values // powers % 10, -1)
        return jnp.concatenate([jnp.zeros(1, jnp.int32), digits])


@dataclasses.dataclass(frozen=True)
class Offers:
    """A row that lists the legal actions; the value is bool [actions]."""

    names: tuple[str, ...]
    before: str = 'On offer:'

    def places(self) -> list[tuple[str, ...]]:
        inner = tuple(f' {name},' for name in self.names)
        last = tuple(f' {name}\n' for name in (*self.names, 'nothing'))
        return [(self.before,), *[inner] * len(self.names), last]

    def index(self, values: jax.Array) -> jax.Array:
        number = jnp.arange(len(self.names))
        last = jnp.max(jnp.where(values, number, -1))
        inner = jnp.where(values & (number < last), number, -1)
        last = jnp.where(last < 0, len(self.names), last)
        return jnp.concatenate([jnp.zeros(1, jnp.int32), inner, last[None]]).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several lines; the value is int [], -1 = none."""

    texts: tuple[str, ...]

    def places(self) -> list[tuple[str, ...]]:
        return [tuple(f'{text}\n' for text in self.texts)]

    def index(self, values: jax.Array) -> jax.Array:
        return jnp.atleast_1d(jnp.asarray(values, jnp.int32))


class Layout:
    """Parts in consecutive rows.

    texts: all pieces; slots: the range of texts at each place. Places with the same pieces share
    them.
    """

    def __init__(self, *parts: Any):
        self.parts, self.texts, known = parts, [], {}
        places = [pieces for part in parts for pieces in part.places()]
        for pieces in dict.fromkeys(places):
            known[pieces] = range(len(self.texts), len(self.texts) + len(pieces))
            self.texts += pieces
        self.slots = [known[pieces] for pieces in places]

    def ids(self, values: Sequence[Any]) -> jax.Array:
        """Return the line ids for the values of each part; int32 [places]."""
        index = [part.index(value) for part, value in zip(self.parts, values, strict=True)]
        index = jnp.concatenate(index)
        starts = jnp.array([slot.start for slot in self.slots], jnp.int32)
        return jnp.where(index >= 0, starts + index, -1).astype(jnp.int32)
