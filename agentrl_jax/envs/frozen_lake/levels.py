"""Draw FrozenLake maps on the host: random ice, start and goal, with disjoint splits."""

from typing import Any

import numpy as np
from scipy import ndimage

from agentrl_jax.envs.splits import check_split, level_split

FROZEN, HOLE, GOAL, START = range(4)
NEIGHBOURS = ndimage.generate_binary_structure(2, 1)[None]  # of a cell, in each map


def make_maps(
    split: str | None, num: int, *, size: int, frozen: float, seed: int, unique: bool = True
) -> np.ndarray:
    """Draw `num` random solvable maps, int8 [num, n, n]: iid ice, any start and goal (RAGEN).

    `unique` drops repetitions; split None accepts maps of all splits.
    """
    check_split(split)
    rng = np.random.default_rng([seed, size])
    maps: dict[Any, np.ndarray] = {}
    for _ in range(64):
        boards = _random_maps(rng, 2 * num + 64, size, frozen)
        for board in boards[distance_to_goal(boards) > 0]:
            key = board.tobytes()
            if split is None or level_split(key) == split:
                maps.setdefault(key if unique else len(maps), board)
            if len(maps) == num:
                return np.stack(list(maps.values()))
    raise ValueError(
        f'num_levels={num}, but only {len(maps)} different {split} maps of size {size} with '
        f'frozen={frozen} were found. Use fewer levels'
    )


def _random_maps(rng: np.random.Generator, num: int, size: int, frozen: float) -> np.ndarray:
    boards = np.where(rng.random((num, size**2)) < frozen, FROZEN, HOLE).astype(np.int8)
    start = rng.integers(size**2, size=num)
    goal = (start + rng.integers(1, size**2, size=num)) % size**2  # uniform over the other cells
    rows = np.arange(num)
    boards[rows, start], boards[rows, goal] = START, GOAL
    return boards.reshape(num, size, size)


def distance_to_goal(boards: np.ndarray) -> np.ndarray:
    """Return int32 [num]: length of the shortest path from start to goal; -1 = no path."""
    reached, passable = boards == START, boards != HOLE
    distance = np.full(len(boards), -1, np.int32)
    for moves in range(1, boards[0].size):
        wider = ndimage.binary_dilation(reached, NEIGHBOURS, mask=passable)
        if (wider == reached).all():
            break
        reached = wider
        distance[(distance < 0) & (reached & (boards == GOAL)).any((1, 2))] = moves
    return distance
