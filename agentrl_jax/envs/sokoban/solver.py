"""Shortest solutions of Sokoban rooms by breadth-first search."""

import functools
from collections import deque

import numpy as np

WALL, FLOOR, TARGET = range(3)  # values of EnvState.fixed


def solve_sokoban(fixed: np.ndarray, boxes: np.ndarray, player: int) -> tuple[int, ...] | None:
    """Return the shortest solution (up, down, left, right = 0..3) of a room; None = unsolvable.

    fixed int [n, n], boxes bool [n, n], player = row * n + column.
    """
    start = (int(player), tuple(np.flatnonzero(np.asarray(boxes).reshape(-1)).tolist()))
    fixed = np.asarray(fixed, np.int8)
    return _solve(fixed.tobytes(), fixed.shape[0], *start)


@functools.lru_cache(maxsize=1 << 16)
def _solve(fixed: bytes, dim: int, player: int, boxes: tuple[int, ...]) -> tuple[int, ...] | None:
    is_open = [code != WALL for code in fixed]
    targets = {cell for cell, code in enumerate(fixed) if code == TARGET}
    start = (player, frozenset(boxes))
    parents: dict = {start: None}
    queue = deque([start] if len(start[1] - targets) else [])
    if not queue:
        return ()
    while queue:
        state = queue.popleft()
        for action, after in _moves(is_open, dim, *state):
            if after in parents:
                continue
            parents[after] = (state, action)
            if after[1] <= targets:
                return _path(parents, after)
            queue.append(after)
    return None


def _moves(is_open: list[bool], dim: int, player: int, boxes: frozenset):
    """Yield (action, next state) of every action that moves the player."""
    for action, step in enumerate((-dim, dim, -1, 1)):
        ahead = player + step
        if not is_open[ahead]:
            continue
        if ahead not in boxes:
            yield action, (ahead, boxes)
        elif is_open[ahead + step] and ahead + step not in boxes:
            yield action, (ahead, boxes - {ahead} | {ahead + step})


def _path(parents: dict, state: tuple) -> tuple[int, ...]:
    actions = []
    while parents[state] is not None:
        state, action = parents[state]
        actions.append(action)
    return tuple(reversed(actions))
