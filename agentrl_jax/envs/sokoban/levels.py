"""Generate Sokoban rooms with RAGEN's procedure, on the host, with optimal solution lengths.

Steps: (a) a random walk carves the floor; (b) the player, and boxes on targets, are placed on
random floor cells; (c) depth-first reverse play pulls boxes and keeps the state with the largest
(changes of the pulled box) x (sum of Manhattan distances of boxes to their targets); (d) the player
walks up to three steps. Levels without displacement are drawn again.
"""

from typing import Any

import numpy as np

from agentrl_jax.envs.sokoban.solver import TARGET, WALL, solve_sokoban
from agentrl_jax.envs.splits import check_split, level_split

TURN_PROBABILITY = 0.35
MAX_STATES = 300_000  # states explored per reverse play
WALK_DIRECTIONS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])
# Floor carved around each step of the walk: two lines, an angle, a square, the other angle.
MASKS = np.array(
    [
        [[0, 0, 0], [1, 1, 1], [0, 0, 0]],
        [[0, 1, 0], [0, 1, 0], [0, 1, 0]],
        [[0, 0, 0], [1, 1, 0], [0, 1, 0]],
        [[0, 0, 0], [1, 1, 0], [1, 1, 0]],
        [[0, 0, 0], [0, 1, 1], [0, 1, 0]],
    ],
    bool,
)


def make_pool(
    split: str | None,
    num: int,
    *,
    dim: int = 6,
    num_boxes: int = 1,
    search_depth: int = 300,
    seed: int = 0,
    unique: bool = True,
) -> dict[str, np.ndarray]:
    """Return arrays of `num` levels, by the names of world.EnvParams.

    The split depends on a hash of walls and targets, so pools of different splits do not even share
    rooms with different box positions, for any seeds. `unique` drops repeated levels, which are
    easier: random play solves 15.3 % of 4096 distinct 6x6 rooms in 10 actions, but 17.0 % with
    repetitions.
    """
    check_split(split)
    rng = np.random.default_rng([seed, dim, num_boxes])
    levels: dict[Any, tuple] = {}
    barren = 0  # consecutive batches without a new level
    while barren < 8:
        before = len(levels)
        for fixed, start in _random_rooms(rng, 1024, dim, num_boxes):
            if split is not None and level_split(fixed.tobytes()) != split:
                continue
            level = _play_reverse(rng, fixed, start, search_depth)
            if level is None:
                continue
            levels.setdefault((fixed.tobytes(), *level) if unique else len(levels), (fixed, *level))
            if len(levels) == num:
                return _solved_pool(list(levels.values()), dim)
        barren = 0 if len(levels) > before else barren + 1
    raise ValueError(
        f'num_levels={num}, but only {len(levels)} different {split} levels of dim={dim}, '
        f'num_boxes={num_boxes} were found. Use fewer levels'
    )


def _solved_pool(levels: list[tuple], dim: int) -> dict[str, np.ndarray]:
    boxes = np.zeros((len(levels), dim * dim), bool)
    for index, (_, _, cells) in enumerate(levels):
        boxes[index, list(cells)] = True
    fixed = np.stack([level[0] for level in levels])
    player = np.array([level[1] for level in levels], np.int32)
    boxes = boxes.reshape(fixed.shape)
    lengths = [len(solve_sokoban(*level)) for level in zip(fixed, boxes, player, strict=True)]
    optimal_length = np.array(lengths, np.int32)
    return dict(fixed=fixed, boxes=boxes, player=player, optimal_length=optimal_length)


def _random_rooms(rng: np.random.Generator, num: int, dim: int, num_boxes: int):
    """Yield (fixed int8 [dim, dim], player cell) of rooms with enough floor."""
    rows = np.arange(num)
    direction = rng.integers(4, size=num)
    # RAGEN starts between 1 and dim - 1, then clips each step into the interior.
    position = rng.integers(1, dim, size=(num, 2))
    floor = np.zeros((num, dim, dim), bool)
    for _ in range(int(1.7 * (dim + dim))):
        turn = rng.random(num) < TURN_PROBABILITY
        direction = np.where(turn, rng.integers(4, size=num), direction)
        position = np.clip(position + WALK_DIRECTIONS[direction], 1, dim - 2)
        mask = MASKS[rng.integers(len(MASKS), size=num)]
        for dr in range(3):
            for dc in range(3):
                floor[rows, position[:, 0] + dr - 1, position[:, 1] + dc - 1] |= mask[:, dr, dc]
    floor[:, [0, -1], :] = floor[:, :, [0, -1]] = False
    order = np.argsort(np.where(floor, rng.random(floor.shape), 2.0).reshape(num, -1), axis=1)
    for index in rows[floor.sum((1, 2)) > num_boxes + 1]:
        fixed = floor[index].astype(np.int8)
        fixed.reshape(-1)[order[index, 1 : num_boxes + 1]] = TARGET
        yield fixed, int(order[index, 0])


def _play_reverse(
    rng: np.random.Generator, fixed: np.ndarray, player: int, search_depth: int
) -> tuple[int, tuple[int, ...]] | None:
    """Return (player cell, box cells) of a start state; None if no box can leave its target."""
    search = _ReversePlay(fixed)
    search.visit(player, search.targets, (False,) * len(search.targets), 0, -1, search_depth)
    player, boxes = search.best
    distance = search.displacement(boxes)
    if distance == 0:
        return None
    if rng.random() < (0.8 if distance == 1 else 0.5):
        player = _walk(rng, search, player, boxes)
    return player, tuple(sorted(boxes))


def _walk(rng: np.random.Generator, search: '_ReversePlay', player: int, boxes: tuple) -> int:
    """Walk one to three random steps without revisiting a cell; stop after each with odds 1/2."""
    visited = [player]
    for _ in range(3):
        steps = [player + d for d in search.moves]
        steps = [c for c in steps if search.open[c] and c not in boxes and c not in visited]
        if not steps:
            break
        player = steps[rng.integers(len(steps))]
        visited.append(player)
        if rng.random() > 0.5:
            break
    return player


class _ReversePlay:
    """Depth-first search over pulls and moves (up, down, left, right) from the solved room."""

    def __init__(self, fixed: np.ndarray):
        self.dim = fixed.shape[0]
        self.moves = (-self.dim, self.dim, -1, 1)
        self.open = (fixed.reshape(-1) != WALL).tolist()
        self.targets = tuple(np.flatnonzero(fixed.reshape(-1) == TARGET).tolist())
        self.explored: set = set()
        self.best_score, self.best = -1, (-1, self.targets)

    def displacement(self, boxes: tuple[int, ...]) -> int:
        """Return the sum of Manhattan distances from boxes to their original targets."""
        n = self.dim
        pairs = zip(boxes, self.targets, strict=True)
        return sum(abs(b // n - t // n) + abs(b % n - t % n) for b, t in pairs)

    def visit(
        self, player: int, boxes: tuple, pulled: tuple, swaps: int, last: int, depth: int
    ) -> None:
        """Explore a state. boxes[i] started on targets[i]; swaps: changes of the pulled box."""
        depth -= 1
        # As in RAGEN's board bytes, boxes differ only by whether they have moved.
        state = (player, *sorted(zip(boxes, pulled, strict=True)))
        if depth <= 0 or len(self.explored) >= MAX_STATES or state in self.explored:
            return
        self.explored.add(state)
        covered = player in self.targets or any(box in self.targets for box in boxes)
        score = 0 if covered else swaps * self.displacement(boxes)
        if score > self.best_score:
            self.best_score, self.best = score, (player, boxes)
        for step in self.moves:
            ahead, pull_from = player + step, player - step
            if not self.open[ahead] or ahead in boxes:
                continue
            if pull_from in boxes:
                box = boxes.index(pull_from)
                moved = (*boxes[:box], player, *boxes[box + 1 :])
                flags = (*pulled[:box], True, *pulled[box + 1 :])
                self.visit(ahead, moved, flags, swaps + (box != last), box, depth)
            else:
                self.visit(ahead, boxes, pulled, swaps, last, depth)
