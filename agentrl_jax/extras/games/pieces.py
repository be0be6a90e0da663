"""Observations piece by piece: boards cell by cell, numbers digit by digit, actions on offer.

A world whose rows have too many values to list each as a line of its own (six cells of eighteen
kinds: 34 million) lists the pieces that a row is made of. A piece is a text without a newline, or
one that ends a row; what is where is a list of their numbers, made on the device (see
TextEnvironment.line_ids). That the tokens of a row are those of its pieces is checked when a prompt
is built (text.lines).
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
    """Symbols in rows and columns; its value is int [rows, columns]."""

    symbols: tuple[str, ...]  # the first one is that of an empty cell
    rows: int
    columns: int  # at least 2
    blank: str = ' '  # between two
    trimmed: bool = False  # empty rows above all others are left out, the last row never

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
            shown = (jnp.cumsum(jnp.any(cells > 0, 1)) > 0) | (
                jnp.arange(self.rows) == self.rows - 1
            )
            cells = jnp.where(shown[:, None], cells, -1)
        return cells.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Number:
    """A row with a number, as 'Chips: 12'; its value is int [], from 0, below 10 ** digits."""

    before: str
    digits: int

    def families(self) -> dict[str, list[str]]:
        digits = [str(n) for n in range(10)]
        return dict(before=[self.before], digit=digits, last=[f'{digit}\n' for digit in digits])

    def places(self) -> list[str]:
        return ['before', *['digit'] * (self.digits - 1), 'last']

    def index(self, values: jax.Array) -> jax.Array:
        powers = 10 ** np.arange(self.digits)[::-1]
        shown = (values >= powers) | (powers == 1)
        digits = jnp.where(shown, values // powers % 10, -1)
        return jnp.concatenate([jnp.zeros(1, jnp.int32), digits])


@dataclasses.dataclass(frozen=True)
class Offers:
    """A row that lists the actions on offer; its value is bool [actions]."""

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
    """One of several lines; its value is int [], -1 = none."""

    texts: tuple[str, ...]

    def families(self) -> dict[str, list[str]]:
        return dict(line=[f'{text}\n' for text in self.texts])

    def places(self) -> list[str]:
        return ['line']

    def index(self, values: jax.Array) -> jax.Array:
        return jnp.atleast_1d(jnp.asarray(values, jnp.int32))


class Layout:
    """Parts one below the other; equal settings make equal layouts."""

    def __init__(self, *parts: Any):
        self.parts = parts
        families = {}
        for number, part in enumerate(parts):
            families |= {f'{number} {name}': texts for name, texts in part.families().items()}
        self.lines = Lines(**families)

    def places(self) -> list[str]:
        """Name of the family at each place."""
        return [f'{n} {name}' for n, part in enumerate(self.parts) for name in part.places()]

    def slots(self) -> list[range]:
        return [self.lines.slots[place] for place in self.places()]

    def ids(self, values: Sequence[Any]) -> jax.Array:
        """int32 [places] of the values of each part."""
        index = [part.index(value) for part, value in zip(self.parts, values, strict=True)]
        index = jnp.concatenate(index)
        starts = jnp.array([slot.start for slot in self.slots()], jnp.int32)
        return jnp.where(index >= 0, starts + index, -1).astype(jnp.int32)
