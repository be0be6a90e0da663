"""Experts of the games (host): plans for N boards at once, for TextEnvironment.plans."""

import functools
import itertools
import math
from typing import Any

import numpy as np

# ---- Connect Four ------------------------------------------------------------------------------

COLUMNS, ROWS = 7, 6
WORTH = np.array([0, 1, 4, 16, 0])  # of a line with discs of one player only, by their number


@functools.cache
def lines_of_four() -> np.ndarray:
    """Return the cells of every row, column and diagonal of four; int [69, 4]."""
    starts = itertools.product(range(ROWS), range(COLUMNS), ((0, 1), (1, 0), (1, 1), (1, -1)))
    ends = [((r, c), (dr, dc), (r + 3 * dr, c + 3 * dc)) for r, c, (dr, dc) in starts]
    inside = [line for line in ends if line[2][0] < ROWS and 0 <= line[2][1] < COLUMNS]
    return np.array(
        [[(r + i * dr) * COLUMNS + c + i * dc for i in range(4)] for (r, c), (dr, dc), _ in inside]
    )


def best_columns(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the column that wins, else prevents a loss, else has the best lines of four; int [N].

    mine, theirs: bool [N, 6, 7], the lowest row last.
    """
    rows, value = np.arange(len(mine)), np.full((len(mine), COLUMNS), -np.inf)
    for column in range(COLUMNS):
        height = (mine | theirs)[:, :, column].sum(1)
        after = mine.copy()
        after[rows, np.maximum(ROWS - 1 - height, 0), column] = True
        value[:, column] = np.where(height < ROWS, _worth(after, theirs), -np.inf)
    return value.argmax(1)


def _worth(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the value of boards on which the other player moves next; float [N]."""
    empty = ~(mine | theirs)
    below = np.concatenate([empty[:, 1:], np.zeros_like(empty[:, :1])], axis=1)
    next_ = (empty & ~below).reshape(len(mine), -1)[:, lines_of_four()].any(-1)
    discs, other = (x.reshape(len(x), -1)[:, lines_of_four()].sum(-1) for x in (mine, theirs))
    loses = ((other == 3) & (discs == 0) & next_).any(1)
    lines = WORTH[discs] * (other == 0) - WORTH[other] * (discs == 0)
    return lines.sum(1) + 1e6 * (discs == 4).any(1) - 1e3 * loses


# ---- 2048 --------------------------------------------------------------------------------------


def slid(board: np.ndarray, action: int) -> np.ndarray:
    """Return boards [N, 4, 4] of exponents after Left, Up, Right or Down, without the new tile."""
    rows = _packed(np.rot90(board, action, (1, 2)).reshape(-1, 4))
    for i in range(3):
        meet = (rows[:, i] > 0) & (rows[:, i] == rows[:, i + 1])
        rows[:, i] += meet
        rows[meet, i + 1] = 0
    return np.rot90(_packed(rows).reshape(board.shape), -action, (1, 2))


def _packed(rows: np.ndarray) -> np.ndarray:
    """Move the empty cells of rows [M, 4] to the end."""
    return np.take_along_axis(rows, np.argsort(rows == 0, axis=1, kind='stable'), axis=1)


def best_slides(games: Any, goal: int, depth: int = 3) -> list[list[int]]:
    """Return the shortest plans that make the largest tiles, ignoring new tiles; [] = no slide.

    games: of 2048, [N]; goal: exponent that ends a game. All slides must be legal at the start.
    """
    board, offered = np.argmax(games.observation, -1), np.asarray(games.legal_action_mask)
    best, plans = np.full(len(board), -np.inf), [[] for _ in board]
    ahead = {(): (board, np.ones(len(board), bool))}
    for length in range(1, depth + 1):
        ahead = {
            (*plan, action): (after, possible & offered[:, action] & (after != old).any((1, 2)))
            for plan, (old, possible) in ahead.items()
            for action in range(4)
            for after in [slid(old, action)]
        }
        for plan, (after, possible) in ahead.items():
            value = np.where(after > 0, 4.0**after, 0.0).sum((1, 2))
            value = np.where(after.max((1, 2)) >= goal, 1e12 - length, value)
            for i in np.flatnonzero(possible & (value > best)):
                best[i], plans[i] = value[i], list(plan)
    return plans


# ---- Minesweeper -------------------------------------------------------------------------------


@functools.cache
def around(side: int) -> np.ndarray:
    """Return 1 for neighbouring cells, including diagonal ones; int [cells, cells]."""
    row, column = np.divmod(np.arange(side**2), side)
    far = np.maximum(abs(row[:, None] - row), abs(column[:, None] - column))
    return (far == 1).astype(np.int32)


@functools.cache
def minefields(cells: int, mines: int) -> np.ndarray:
    """Return every placement of the mines; bool [fields, cells]."""
    laid = np.array(list(itertools.combinations(range(cells), mines)))
    return (np.arange(cells) == laid[..., None]).any(1)


def safest_cells(mines: np.ndarray, opened: np.ndarray, number: int) -> list[list[int]]:
    """Return the cell with a mine in the fewest of all consistent minefields.

    mines, opened: bool [N, 16]. Of the mines only the numbers on open cells are used.
    """
    near = around(math.isqrt(mines.shape[1]))
    fields = minefields(mines.shape[1], number)
    numbers, plans = mines @ near, []
    for counts, open_ in zip(numbers, opened, strict=True):
        same = ~(fields & open_).any(1) & (fields @ near == counts)[:, open_].all(1)
        danger = np.where(open_, 2.0, fields[same].mean(0)) if same.any() else [0.0]
        plans.append([int(np.argmin(danger))])
    return plans
