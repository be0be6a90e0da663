"""Text formats of boards: rows of symbols, with or without spaces, coordinates, or both.

Byte-pair tokenizers merge adjacent symbols; 'cells' (' P _ O G') puts a space before each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

ROWS_ONLY = ('grid', 'cells')
FORMATS = (*ROWS_ONLY, 'coord', 'grid_coord')


def row(signs: Sequence[str], observation_format: str) -> str:
    """Return the line of one row."""
    return ''.join(f' {sign}' if observation_format == 'cells' else sign for sign in signs) + '\n'


def coordinates(cells: Any) -> str:
    """Format an [n, 2] array as '(r, c), (r, c)'."""
    return ', '.join(f'({int(r)}, {int(c)})' for r, c in np.asarray(cells))
