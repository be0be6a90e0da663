"""FrozenLake with a different map in every level, after RAGEN and gymnasium's FrozenLake-v1."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs import boards
from agentrl_jax.envs.base import Lines, TextEnvironment, environment, of_pool, spaces
from agentrl_jax.envs.frozen_lake.levels import (
    FROZEN,
    GOAL,
    HOLE,
    START,
    distance_to_goal,
    make_maps,
)
from agentrl_jax.envs.frozen_lake.solver import MOVES, lake_plans, lake_values
from agentrl_jax.settings.marks import SHARE, In, NameIn
from agentrl_jax.settings.rules import Rule

SYMBOLS = 'P_OGX√'  # player, frozen, hole, goal, player in hole, player on goal
PLAYER, EMPTY, OPEN_HOLE, OPEN_GOAL, IN_HOLE, ON_GOAL = range(6)
CELL_NAMES = ('player', 'empty', 'hole', 'goal', 'player in hole', 'player on goal')

# Wording of RAGEN (mll-lab-nu/RAGEN, config/envs.yaml), including its typo.
SLIPPERY = 'You may move to the unintended direction due to the slippery ice. '
INSTRUCTION = (
    'You are solving the FrozenLake puzzle. Forbid the whole and go to the target. '
    f'{SLIPPERY}Example answer format: <think>To forbid the '
    'hole and go to the target, I should go left then go up.</think><answer>Left || Up</answer>'
)
# RAGEN gives (5, 5) as the last corner of its 4x4 maps; here the corner is correct.
COORD_SLIPPERY = (
    'Beware that the ice is slippery, so the agent might slide and end up in an unintended tile.\n'
)
COORD_INSTRUCTION = (
    'You are solving the FrozenLake puzzle. The observation includes both a symbol grid and '
    'zero-indexed coordinates for the start, goal, player, and any holes.\n'
    'Coordinates range from the top-left corner (0, 0) to the bottom-right corner ({last}, {last})'
    f'.\n{COORD_SLIPPERY}'
    'Respond with a sequence of actions such as <answer>Left || Up || Up</answer>.\n'
)


@struct.dataclass
class EnvState(environment.EnvState):
    """One lake. time: int32 []."""

    board: jax.Array  # int8 [n, n]  FROZEN, HOLE, GOAL or START
    position: jax.Array  # int32 []    row * n + column of the player


@struct.dataclass
class EnvParams(environment.EnvParams):
    """The pool of maps and the slipperiness of the ice."""

    boards: jax.Array = None  # int8 [levels, n, n]
    optimal_length: jax.Array = None  # int32 [levels]  fewest moves to the goal without slips
    success_rate: jax.Array = 1.0 / 3.0  # float32 [] probability of the intended move
    max_steps_in_episode: int = 100


@dataclasses.dataclass(frozen=True)
class FrozenLake(TextEnvironment):
    """Reach the goal; a hole ends the episode. Reward 1 at the goal, else 0.

    A move goes in the intended direction with probability success_rate, and to each side with half
    of the remaining probability (gymnasium).
    """

    size: Annotated[int, In(2, 8)] = 4  # side of the map
    observation_format: Annotated[str, NameIn(boards.FORMATS)] = 'grid'  # cells (' P _'): for BPE
    frozen: Annotated[float, SHARE] = of_pool(0.8)  # probability that a cell is ice (RAGEN: or .9)
    success_rate: Annotated[float, SHARE] = of_pool(1.0 / 3.0)  # probability of the intended move

    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('Left', 'Down', 'Right', 'Up')
    REWARD_QUANTUM: ClassVar[float] = 1.0
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    name: ClassVar[str] = 'frozen_lake'
    RULES = (  # coordinates need one line per set of holes: 2 ** 16 at size 4, 2 ** 25 at size 5
        Rule({'observation_format': set(boards.ROWS_ONLY), 'size': In(high=4)}),
    )

    @property
    def instruction(self) -> str:
        if self.observation_format not in boards.ROWS_ONLY:
            return COORD_INSTRUCTION.format(last=self.size - 1)
        legend = ', '.join(f'{s}: {name}' for s, name in zip(SYMBOLS, CELL_NAMES, strict=True))
        return f'{INSTRUCTION}\nThe meaning of each symbol in the state is:\n{legend}'

    def rules(self, params: EnvParams) -> str:
        """Return the rules; RAGEN's sentences about slippery ice are dropped if it is not."""
        if float(params.success_rate) < 1:
            return self.instruction
        return self.instruction.replace(SLIPPERY, '').replace(COORD_SLIPPERY, '')

    def make_params(
        self,
        split: str | None = 'train',
        *,
        num_levels: int = 1024,
        seed: int = 0,
        unique: bool = True,
    ) -> EnvParams:
        """Draw a pool of random maps. unique: without repetitions."""
        boards = make_maps(
            split, num_levels, size=self.size, frozen=self.frozen, seed=seed, unique=unique
        )
        return EnvParams(
            boards=jnp.asarray(boards),
            optimal_length=jnp.asarray(distance_to_goal(boards)),
            success_rate=jnp.float32(self.success_rate),
        )

    def num_levels(self, params: EnvParams) -> int:
        return params.boards.shape[0]

    def reset_level(self, level: jax.Array, params: EnvParams) -> EnvState:
        board = params.boards[level]
        position = jnp.argmax(board.reshape(-1) == START).astype(jnp.int32)
        return EnvState(time=jnp.int32(0), board=board, position=position)

    def advance(
        self, key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
    ) -> tuple[EnvState, jax.Array, jax.Array]:
        """Draw the move from (action - 1, action, action + 1) mod 4, as in gymnasium."""
        slip = (1.0 - params.success_rate) / 2.0
        u = jax.random.uniform(key)
        turned = (u >= slip).astype(jnp.int32) + (u >= slip + params.success_rate) - 1
        step = jnp.asarray(MOVES, jnp.int32)[(action + turned) % 4]
        row, column = jnp.divmod(state.position, self.size)
        row = jnp.clip(row + step[0], 0, self.size - 1)
        column = jnp.clip(column + step[1], 0, self.size - 1)
        after = state.replace(position=row * self.size + column)
        reward = self.success(after, params).astype(jnp.float32)
        return after, reward, after.position != state.position

    def _tile(self, state: EnvState) -> jax.Array:
        return state.board.reshape(-1)[state.position]

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        tile = self._tile(state)
        return (tile == GOAL) | (tile == HOLE)

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        """Return whether the player is on the goal."""
        return self._tile(state) == GOAL

    def observe(self, key: jax.Array, state: EnvState, action: Any, params: EnvParams) -> jax.Array:
        """Return int8 [n, n]: the index into SYMBOLS of each cell."""
        codes = jnp.asarray(np.array([EMPTY, OPEN_HOLE, OPEN_GOAL, EMPTY]), jnp.int8)[state.board]
        tile = self._tile(state)
        player = jnp.where(tile == HOLE, IN_HOLE, jnp.where(tile == GOAL, ON_GOAL, PLAYER))
        here = jnp.arange(self.size**2).reshape(self.size, self.size) == state.position
        return jnp.where(here, player.astype(jnp.int8), codes)

    def observation_space(self, params: Any = None) -> spaces.Box:
        return spaces.Box(0, len(SYMBOLS) - 1, (self.size, self.size), jnp.int8)

    def lines(self, params: Any = None) -> list[str]:
        return _line_families(self).texts

    def line_slots(self, params: Any = None) -> list[range]:
        slots = _line_families(self).slots
        rows = [slots['row']] * self.size
        if self.observation_format in boards.ROWS_ONLY:
            return rows
        entities = [slots[name] for name in ('head', 'start', 'goal', 'player', 'holes')]
        return entities if self.observation_format == 'coord' else [*entities, slots['map'], *rows]

    def line_ids(self, state: EnvState, params: Any = None) -> jax.Array:
        families = _line_families(self)
        rows = self._row_ids(state)
        if self.observation_format in boards.ROWS_ONLY:
            return families.ids('row', rows)
        flat = state.board.reshape(-1)
        tile = self._tile(state)
        kind = jnp.where(tile == GOAL, 1, jnp.where(tile == HOLE, 2, 0))
        holes = (flat == HOLE).astype(jnp.int32) @ (1 << np.arange(self.size**2))
        entities = [
            families.ids('head', 0),
            families.ids('start', jnp.argmax(flat == START)),
            families.ids('goal', jnp.argmax(flat == GOAL)),
            families.ids('player', kind * self.size**2 + state.position),
            families.ids('holes', holes - 1, holes > 0),
        ]
        if self.observation_format == 'grid_coord':
            entities += [families.ids('map', 0), families.ids('row', rows)]
        return jnp.concatenate(entities)

    def _row_ids(self, state: EnvState) -> jax.Array:
        """Encode (holes, goal column or n, player column or n) of each row; int32 [n]."""
        n = self.size
        holes = (state.board == HOLE).astype(jnp.int32) @ (1 << np.arange(n))
        is_goal = state.board == GOAL
        goal = jnp.where(is_goal.any(1), jnp.argmax(is_goal, 1), n)
        row, column = jnp.divmod(state.position, n)
        player = jnp.where(jnp.arange(n) == row, column, n)
        return (holes * (n + 1) + goal) * (n + 1) + player

    def observation_text(self, state: EnvState) -> str:
        rows = np.array(list(SYMBOLS))[self._shown(state)]
        grid = ''.join(boards.row(row, self.observation_format) for row in rows)
        if self.observation_format in boards.ROWS_ONLY:
            return grid
        board, where = np.asarray(state.board), divmod(int(state.position), self.size)
        player = {GOAL: 'Player on goal', HOLE: 'Player in hole'}
        text = f'Board size: {self.size} rows x {self.size} cols (zero-indexed).\n'
        text += f'Start: {boards.coordinates(np.argwhere(board == START))}\n'
        text += f'Goal: {boards.coordinates(np.argwhere(board == GOAL))}\n'
        text += f'{player[board[where]] if board[where] in player else "Player"}: {where}\n'
        if (board == HOLE).any():
            text += f'Holes: {boards.coordinates(np.argwhere(board == HOLE))}\n'
        return (
            text
            if self.observation_format == 'coord'
            else f'Coordinates: \n{text}Grid Map: \n{grid}'
        )

    def cells(self, state: EnvState) -> list[list[str]]:
        return [[CELL_NAMES[code] for code in row] for row in self._shown(state)]

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Return the shortest of the safest paths for the remaining actions, without slips."""
        return lake_plans(
            np.asarray(states.board),
            np.asarray(states.position),
            float(params.success_rate),
            max_actions - used,
        )

    def random_success(
        self, params: EnvParams, budgets: Sequence[int], *, rollouts: int = 20, seed: int = 0
    ) -> np.ndarray:
        """Exact, including slips."""
        return self._start_values(params, budgets, 'random')

    def oracle_success(
        self, params: EnvParams, budgets: Sequence[int], *, seed: int = 0
    ) -> np.ndarray:
        """Exact, including slips."""
        return self._start_values(params, budgets, 'best')

    def _start_values(self, params: EnvParams, budgets: Sequence[int], play: str) -> np.ndarray:
        """Return float [budgets, levels]: probability of reaching the goal from the start."""
        boards = np.asarray(params.boards)
        start = (boards.reshape(len(boards), -1) == START).argmax(1)
        horizon, rate = int(max(budgets)), float(params.success_rate)
        values, _ = lake_values(boards, rate, horizon, play=play)
        return values[np.asarray(budgets)][:, np.arange(len(boards)), start]

    def _shown(self, state: EnvState) -> np.ndarray:
        """Return int [n, n]: indices into SYMBOLS, on the host."""
        board, where = np.asarray(state.board), divmod(int(state.position), self.size)
        codes = np.select([board == HOLE, board == GOAL], [OPEN_HOLE, OPEN_GOAL], EMPTY)
        codes[where] = {HOLE: IN_HOLE, GOAL: ON_GOAL, FROZEN: PLAYER, START: PLAYER}[
            int(board[where])
        ]
        return codes


@functools.cache
def _line_families(env: FrozenLake) -> Lines:
    """All lines of an environment, each family in the order of its index."""
    n, entity = env.size, [(r, c) for r in range(env.size) for c in range(env.size)]
    rows = []
    for holes in range(2**n):
        for goal in range(n + 1):
            for player in range(n + 1):
                rows.append(boards.row(_row(n, holes, goal, player), env.observation_format))
    if env.observation_format in boards.ROWS_ONLY:
        return Lines(row=rows)
    size = f'Board size: {n} rows x {n} cols (zero-indexed).\n'
    holes = [[cell for k, cell in enumerate(entity) if bits >> k & 1] for bits in range(2**n**2)]
    players = ('Player', 'Player on goal', 'Player in hole')
    return Lines(
        head=[size if env.observation_format == 'coord' else f'Coordinates: \n{size}'],
        start=[f'Start: {cell}\n' for cell in entity],
        goal=[f'Goal: {cell}\n' for cell in entity],
        player=[f'{player}: {cell}\n' for player in players for cell in entity],
        holes=[f'Holes: {boards.coordinates(cells)}\n' for cells in holes[1:]],
        map=['Grid Map: \n'],
        row=rows,
    )


def _row(n: int, holes: int, goal: int, player: int) -> list[str]:
    row = ['O' if holes >> k & 1 else '_' for k in range(n)]
    if goal < n:
        row[goal] = 'G'
    if player < n:
        row[player] = {'_': 'P', 'O': 'X', 'G': '√'}[row[player]]
    return row
