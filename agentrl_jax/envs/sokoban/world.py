"""Sokoban after RAGEN and gym-sokoban 0.0.6; the state includes the room."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.base import environment, of_pool
from agentrl_jax.envs.boards import FORMATS, Board, coordinates
from agentrl_jax.envs.sokoban.levels import make_pool
from agentrl_jax.envs.sokoban.solver import TARGET, WALL, solve_sokoban
from agentrl_jax.settings.marks import ONE, In, NameIn
from agentrl_jax.settings.rules import must

BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(3, 7)
CELL_NAMES = ('wall', 'empty', 'target', 'box on target', 'box', 'player', 'player on target')
SYMBOLS = '#_O√XPS'
OTHER_SYMBOLS = 'W.GCBA@'  # RAGEN's SokobanDifferentGridVocab
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])

# Wording of RAGEN (mll-lab-nu/RAGEN, config/envs.yaml).
INSTRUCTION = (
    'You are solving the Sokoban puzzle. \n'
    'You are the player and you need to push all boxes to targets. \n'
    'When you are right next to a box, you can push it by moving in the same direction. \n'
    'You cannot push a box through a wall, and you cannot pull a box. \n'
    'The answer should be a sequence of actions, like <answer>Right || Right || Up</answer>\n'
)
COORD_INSTRUCTION = (
    'You are solving the Sokoban puzzle. You are the player and you need to push all boxes to '
    'targets.\nYou are provided with a symbol grid and the zero-indexed coordinates of the player, '
    'each box, and each target. \n'
    'Coordinates range from the top-left corner (0, 0) to the bottom-right corner ({last}, {last})'
    '. \nWhen you are exactly next to a box, you can push it by moving in the same direction. \n'
    'You cannot push a box through a wall, and you cannot pull a box.\n'
    'The answer should be a sequence of actions, like <answer>Right || Right || Up</answer>.\n'
)


@struct.dataclass
class EnvState(environment.EnvState):
    """One room. time: int32 []."""

    fixed: jax.Array  # int8 [n, n]  WALL, FLOOR or TARGET
    boxes: jax.Array  # bool [n, n]
    player: jax.Array  # int32 []     row * n + column


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The pool of rooms."""

    fixed: jax.Array = None  # int8 [levels, n, n]
    boxes: jax.Array = None  # bool [levels, n, n]
    player: jax.Array = None  # int32 [levels]
    optimal_length: jax.Array = None  # int32 [levels]  length of the shortest solution
    max_steps_in_episode: int = 100


@dataclasses.dataclass(frozen=True)
class Sokoban(Board):
    """Push every box onto a target. A move into a box pushes it if the next cell is free.

    Reward -0.1 per step, +1 for a box moved onto a target, -1 for one moved off, +10 when solved.
    """

    dim: Annotated[int, In(4, 8)] = 6  # side of the room, including walls
    num_boxes: Annotated[int, In(1, 3)] = 1  # number of boxes and of targets
    search_depth: Annotated[int, ONE] = of_pool(300)  # of reverse play (RAGEN: 300, 30, 10)
    observation_format: Annotated[str, NameIn(FORMATS)] = 'grid'  # cells (' # P'): for BPE
    symbols: str = SYMBOLS  # wall, floor, target, box on target, box, player, on target

    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('Up', 'Down', 'Left', 'Right')
    CELL_NAMES: ClassVar[tuple[str, ...]] = CELL_NAMES
    TEXTS: ClassVar[tuple[str, str]] = INSTRUCTION, COORD_INSTRUCTION
    ENTITIES: ClassVar[tuple[str, ...]] = ('targets', 'boxes', 'on_target', 'player')
    REWARD_QUANTUM: ClassVar[float] = 0.1
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (-1.1, 10.9)
    name: ClassVar[str] = 'sokoban'
    RULES = (
        must(
            'symbols',
            f'{len(CELL_NAMES)} different signs',
            lambda world: len(set(world.symbols)) == len(world.symbols) == len(CELL_NAMES),
        ),
    )

    def make_params(
        self,
        split: str | None = 'train',
        *,
        num_levels: int = 1024,
        seed: int = 0,
        unique: bool = True,
    ) -> EnvParams:
        """Generate a pool of rooms with RAGEN's procedure. unique: without repetitions."""
        rules = dict(dim=self.dim, num_boxes=self.num_boxes, search_depth=self.search_depth)
        rooms = make_pool(split, num_levels, **rules, seed=seed, unique=unique)
        return EnvParams(**jax.tree.map(jnp.asarray, rooms))

    def num_levels(self, params: EnvParams) -> int:
        return params.fixed.shape[0]

    def reset_level(self, level: jax.Array, params: EnvParams) -> EnvState:
        return EnvState(
            time=jnp.int32(0),
            fixed=params.fixed[level],
            boxes=params.boxes[level],
            player=params.player[level],
        )

    def advance(
        self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
    ) -> tuple[EnvState, jax.Array, jax.Array]:
        n = self.dim
        cells = jnp.arange(n * n, dtype=jnp.int32).reshape(n, n)
        step = jnp.asarray(MOVES @ [n, 1], jnp.int32)[action]
        ahead, beyond = cells == state.player + step, cells == state.player + 2 * step
        # Reductions over one-hot cells are twice as fast as gathers when vmapped on a CPU.
        open_cell = state.fixed != WALL
        pushes = jnp.any(ahead & state.boxes)
        free = jnp.any(beyond & open_cell & ~state.boxes)
        moves = jnp.any(ahead & open_cell) & (free | ~pushes)
        boxes = jnp.where(moves & pushes, (state.boxes & ~ahead) | beyond, state.boxes)
        after = state.replace(boxes=boxes, player=state.player + jnp.where(moves, step, 0))
        gained = self._on_target(after) - self._on_target(state)
        solved = self.success(after, params)
        reward = -0.1 + jnp.sign(gained).astype(jnp.float32) + jnp.where(solved, 10.0, 0.0)
        return after, reward, moves

    def _on_target(self, state: EnvState) -> jax.Array:
        return jnp.sum(state.boxes & (state.fixed == TARGET), dtype=jnp.int32)

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return self.success(state, params)

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return whether every box is on a target."""
        return self._on_target(state) == self.num_boxes

    def observe(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams) -> jax.Array:
        """Return int8 [n, n]: the index into CELL_NAMES of each cell."""
        here = jnp.arange(self.dim**2).reshape(self.dim, self.dim) == state.player
        on_target = state.fixed == TARGET
        boxed = jnp.where(on_target, jnp.int8(BOX_ON_TARGET), jnp.int8(BOX))
        stood = jnp.where(on_target, jnp.int8(PLAYER_ON_TARGET), jnp.int8(PLAYER))
        return jnp.where(here, stood, jnp.where(state.boxes, boxed, state.fixed))

    @property
    def side(self) -> int:
        return self.dim

    def rows(self) -> Iterator[list[str]]:
        for row in _feasible_rows(self)[0]:
            yield [self.symbols[code] for code in (WALL, *row, WALL)]

    def row_index(self, state: EnvState) -> jax.Array:
        place = 7 ** np.arange(self.dim - 2)
        codes = self.observe(None, state, None, None)[:, 1:-1].astype(jnp.int32) @ place
        return jnp.asarray(_feasible_rows(self)[1])[codes]

    def entity_lines(self) -> dict[str, list[str]]:
        n, players = self.dim, ('Player', 'Player on target')
        sets = [
            coordinates([(c // (n - 2) + 1, c % (n - 2) + 1) for c in cells])
            for cells in _cell_sets(self)[0]
        ]
        return {
            'targets': [f'Targets: {cells}\n' for cells in sets],
            'boxes': [f'Boxes: {cells}\n' for cells in sets],
            'on_target': [f'Boxes on target: {cells}\n' for cells in sets],
            'player': [f'{p}: {divmod(cell, n)}\n' for p in players for cell in range(n * n)],
        }

    def entity_index(self, state: EnvState) -> list[tuple[Any, Any]]:
        target = (state.fixed == TARGET).reshape(-1)
        boxes, here = state.boxes.reshape(-1), jnp.arange(self.dim**2) == state.player
        return [
            (self._set_index(target), True),
            (self._set_index(boxes & ~target), jnp.any(boxes & ~target)),
            (self._set_index(boxes & target), jnp.any(boxes & target)),
            (state.player + self.dim**2 * jnp.any(here & target), True),
        ]

    def entity_text(self, state: EnvState, codes: np.ndarray) -> str:
        text = f'Targets: {coordinates(np.argwhere(np.asarray(state.fixed) == TARGET))}\n'
        entities = {
            'Boxes': BOX,
            'Boxes on target': BOX_ON_TARGET,
            'Player': PLAYER,
            'Player on target': PLAYER_ON_TARGET,
        }
        for label, code in entities.items():
            if (codes == code).any():
                text += f'{label}: {coordinates(np.argwhere(codes == code))}\n'
        return text

    def _set_index(self, chosen: jax.Array) -> jax.Array:
        """Return the index in _cell_sets of a set of up to num_boxes inner cells."""
        n = self.dim
        inner = chosen.reshape(n, n)[1:-1, 1:-1].reshape(-1)
        place = (inner.size + 1) ** np.arange(self.num_boxes)
        cells = jnp.nonzero(inner, size=self.num_boxes, fill_value=inner.size)[0]
        return jnp.asarray(_cell_sets(self)[1])[cells.astype(jnp.int32) @ place]

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Return the shortest solution of each room, regardless of the remaining actions."""
        rooms = zip(states.fixed, states.boxes, states.player, strict=True)
        return [list(solve_sokoban(*room) or ()) for room in rooms]

    def oracle_success(
        self, params: EnvParams, budgets: Sequence[int], *, seed: int = 0
    ) -> np.ndarray:
        """Exact: the shortest solution fits into the budget or not."""
        return np.asarray(params.optimal_length)[None] <= np.asarray(budgets)[:, None]


@functools.cache
def _feasible_rows(env: Sokoban) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return (possible inner rows, base-7 code of an inner row -> its index in that list or -1).

    A row has at most one player, num_boxes boxes and num_boxes targets: 19,024 of the 7 ** 6 rows
    of an 8x8 room with two boxes.
    """
    limit, width = env.num_boxes, env.dim - 2
    index, rows = np.full(7**width, -1, np.int32), []
    for row in itertools.product(range(7), repeat=width):
        count = [row.count(code) for code in range(7)]
        players = count[PLAYER] + count[PLAYER_ON_TARGET]
        boxes = count[BOX] + count[BOX_ON_TARGET]
        targets = count[TARGET] + count[BOX_ON_TARGET] + count[PLAYER_ON_TARGET]
        if players <= 1 and boxes <= limit and targets <= limit:
            index[sum(code * 7**k for k, code in enumerate(row))] = len(rows)
            rows.append(row)
    return rows, index


@functools.cache
def _cell_sets(env: Sokoban) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return (sets of one to num_boxes inner cells, code of a set -> its index in that list or -1).

    The code has one digit in base cells + 1 per box; unused digits are `cells`.
    """
    cells = (env.dim - 2) ** 2
    index, sets = np.full((cells + 1) ** env.num_boxes, -1, np.int32), []
    for size in range(1, env.num_boxes + 1):
        for chosen in itertools.combinations(range(cells), size):
            digits = [*chosen, *[cells] * (env.num_boxes - size)]
            index[sum(d * (cells + 1) ** k for k, d in enumerate(digits))] = len(sets)
            sets.append(chosen)
    return sets, index
