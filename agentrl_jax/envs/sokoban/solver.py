"""Shortest solutions of Sokoban rooms by breadth-first search."""

import functools
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

WALL, FLOOR, TARGET = range(3)  # what EnvState.fixed holds


def solve_sokoban(fixed: np.ndarray, boxes: np.ndarray, player: int) -> tuple[int, ...] | None:
    """Shortest run of actions (up, down, left, right = 0..3) that solves the room; None = stuck.

    fixed int [n, n], boxes bool [n, n], player = row * n + column. Breadth first.
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
    """(action, next state) of every action that moves the player."""
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


def fewest_moves(fixed: jax.Array, horizon: jax.Array) -> jax.Array:
    """int32 [n n, n n]: moves that solve a room of one box, from each cell of the player and box.

    Exact up to `horizon` moves, above it horizon + 1; traced. fixed int8 [n, n].
    """
    n = fixed.shape[0]
    cells = jnp.arange(n * n)
    player, box = cells[:, None], cells[None]
    is_open, target = (fixed != WALL).reshape(-1), (fixed == TARGET).reshape(-1)
    ways = []
    for step in (-n, n, -1, 1):
        ahead, behind = (jnp.clip(player + k * step, 0, n * n - 1) for k in (1, 2))  # walls around
        pushes = ahead == box
        moves = is_open[ahead] & (~pushes | is_open[behind])
        ways.append((jnp.where(moves, ahead, player), jnp.where(moves & pushes, behind, box)))
    players, boxes = (jnp.stack(jnp.broadcast_arrays(*x)) for x in zip(*ways, strict=True))
    solved = jnp.broadcast_to(target[None], (n * n, n * n))

    def one_more(_, moves):
        return jnp.where(solved, 0, jnp.minimum(moves, 1 + moves[players, boxes].min(0)))

    return jax.lax.fori_loop(0, horizon, one_more, jnp.where(solved, 0, horizon + 1))
