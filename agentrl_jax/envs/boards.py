"""Environments on square boards, as text: rows of symbols, coordinates, or both.

Byte-pair tokenizers merge adjacent symbols; 'cells' (' P _ O G') puts a space before each.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.base import Lines, TextEnvironment, spaces

ROWS_ONLY = ('grid', 'cells')
FORMATS = (*ROWS_ONLY, 'coord', 'grid_coord')


def coordinates(cells: Any) -> str:
    """Format an [n, 2] array as '(r, c), (r, c)'."""
    return ', '.join(f'({int(r)}, {int(c)})' for r, c in np.asarray(cells))


@dataclasses.dataclass(frozen=True)
class Board(TextEnvironment):
    """A board of `side` rows; observe returns the index into CELL_NAMES of each cell.

    Subclasses have the fields observation_format and symbols, and define
      side, rows()                    every possible row, as symbols
      row_index(state)                the number of each row in rows(), int32 [side]
      entity_lines()                  families of lines with coordinates, by the names in ENTITIES
      entity_index(state)             for each of them: index of the line, whether it is present
      entity_text(state, codes)       the same lines, written on the host; codes: the observation
    """

    CELL_NAMES: ClassVar[tuple[str, ...]]
    TEXTS: ClassVar[tuple[str, str]]  # the instruction: for rows of symbols, for coordinates
    ENTITIES: ClassVar[tuple[str, ...]]

    @property
    def instruction(self) -> str:
        if self.observation_format not in ROWS_ONLY:
            return self.TEXTS[1].format(last=self.side - 1)
        names = zip(self.symbols, self.CELL_NAMES, strict=True)
        legend = ', '.join(f'{sign}: {name}' for sign, name in names)
        return f'{self.TEXTS[0]}\nThe meaning of each symbol in the state is:\n{legend}'

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(0, len(self.CELL_NAMES) - 1, (self.side, self.side), jnp.int8)

    def row_text(self, signs: Sequence[str]) -> str:
        space = ' ' if self.observation_format == 'cells' else ''
        return ''.join(f'{space}{sign}' for sign in signs) + '\n'

    @property
    def size_text(self) -> str:
        return f'Board size: {self.side} rows x {self.side} cols (zero-indexed).\n'

    def lines(self, params: Any = None) -> list[str]:
        return families(self).texts

    def line_slots(self, params: Any = None) -> list[range]:
        slots = families(self).slots
        rows = [slots['row']] * self.side
        if self.observation_format in ROWS_ONLY:
            return rows
        entities = [slots[name] for name in ('head', *self.ENTITIES)]
        return entities if self.observation_format == 'coord' else [*entities, slots['map'], *rows]

    def line_ids(self, state: Any, params: Any = None) -> jax.Array:
        known = families(self)
        rows = known.ids('row', self.row_index(state))
        if self.observation_format in ROWS_ONLY:
            return rows
        entities = zip(self.ENTITIES, self.entity_index(state), strict=True)
        ids = [known.ids('head', 0), *(known.ids(name, *index) for name, index in entities)]
        if self.observation_format == 'grid_coord':
            ids += [known.ids('map', 0), rows]
        return jnp.concatenate(ids)

    def observation_text(self, state: Any) -> str:
        codes = self._codes(state)
        grid = ''.join(map(self.row_text, np.array(list(self.symbols))[codes]))
        if self.observation_format in ROWS_ONLY:
            return grid
        text = self.size_text + self.entity_text(state, codes)
        is_alone = self.observation_format == 'coord'
        return text if is_alone else f'Coordinates: \n{text}Grid Map: \n{grid}'

    def cells(self, state: Any) -> list[list[str]]:
        return [[self.CELL_NAMES[code] for code in row] for row in self._codes(state)]

    def _codes(self, state: Any) -> np.ndarray:
        return np.asarray(self.observe(None, state, None, None))


@functools.cache
def families(board: Board) -> Lines:
    """Return all lines of a board, each family in the order of its index."""
    rows = list(map(board.row_text, board.rows()))
    if board.observation_format in ROWS_ONLY:
        return Lines(row=rows)
    head = '' if board.observation_format == 'coord' else 'Coordinates: \n'
    return Lines(
        head=[head + board.size_text], **board.entity_lines(), map=['Grid Map: \n'], row=rows
    )
