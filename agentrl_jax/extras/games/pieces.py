"""Observations in pieces: cells of boards, digits of numbers, legal actions.

Some rows have too many values to list each as a line (six cells of eighteen kinds: 34 million).
Their environments list the pieces of a row instead. A piece is a text without a newline, or ends a
row. An observation is a list of piece numbers, made on the device (see TextEnvironment.line_ids).
Building a prompt checks that the tokens of a row are those of its pieces (text.lines).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.base import Lines


@dataclasses.dataclass(frozen=True)
class Grid:
    """Symbols in rows and columns; the value is int [rows, columns]."""

    symbols: tuple[str, ...]  # the first one is an empty cell
    rows: int
    columns: int  # at least 2
    blank: str = ' '  # separator
    trimmed: bool = False  # omit empty rows at the top, except the last row

    def families(self) -> dict[str, list[str]]:
        return dict(
            first=list(self.symbols),
            inner=[f'{self.blank}{symbol}' for symbol in self.symbols],
            last=[f'{self.blank}{symbol}\n' for symbol in self.symbols],
        )

    def places(self) -> list[str]:
        return ['first', *['inner'] * (self.columns - 2), 'last'] * self.rows

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

    def families(self) -> dict[str, list[str]]:
        digits = [str(n) for n in range(10)]
        return dict(before=[self.before], digit=digits, last=[f'{digit}\n' for digit in digits])

    def places(self) -> list[str]:
        return ['before', *['digit'] * (self.digits - 1), 'last']

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

    def families(self) -> dict[str, list[str]]:
        return dict(
            before=[self.before],
            inner=[f' {name},' for name in self.names],
            last=[*(f' {name}\n' for name in self.names), ' nothing\n'],
        )

    def places(self) -> list[str]:
        return ['before', *['inner'] * len(self.names), 'last']

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

    def families(self) -> dict[str, list[str]]:
        return dict(line=[f'{text}\n' for text in self.texts])

    def places(self) -> list[str]:
        return ['line']

    def index(self, values: jax.Array) -> jax.Array:
        return jnp.atleast_1d(jnp.asarray(values, jnp.int32))


class Layout:
    """Parts in consecutive rows; equal settings make equal layouts."""

    def __init__(self, *parts: Any):
        self.parts = parts
        families = {}
        for number, part in enumerate(parts):
            families |= {f'{number} {name}': texts for name, texts in part.families().items()}
        self.lines = Lines(**families)

    def places(self) -> list[str]:
        """Return the name of the family at each place."""
        return [f'{n} {name}' for n, part in enumerate(self.parts) for name in part.places()]

    def slots(self) -> list[range]:
        return [self.lines.slots[place] for place in self.places()]

    def ids(self, values: Sequence[Any]) -> jax.Array:
        """Return the line ids for the values of each part; int32 [places]."""
        index = [part.index(value) for part, value in zip(self.parts, values, strict=True)]
        index = jnp.concatenate(index)
        starts = jnp.array([slot.start for slot in self.slots()], jnp.int32)
        return jnp.where(index >= 0, starts + index, -1).astype(jnp.int32)
