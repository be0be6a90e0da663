"""How a board is written: rows of signs, also with a blank in front of each, coordinates, or both.

Byte-pair tokenizers merge signs that touch; in 'cells' (' P _ O G') each is apart.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

ROWS_ONLY = ('grid', 'cells')
FORMATS = (*ROWS_ONLY, 'coord', 'grid_coord')


def row(signs: Sequence[str], observation_format: str) -> str:
    """The line of one row."""
    return ''.join(f' {sign}' if observation_format == 'cells' else sign for sign in signs) + '\n'


def coordinates(cells: Any) -> str:
    """'(r, c), (r, c)' of an [n, 2] array."""
    return ', '.join(f'({int(r)}, {int(c)})' for r, c in np.asarray(cells))
