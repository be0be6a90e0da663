"""FrozenLake with a different map in every level, after RAGEN and gymnasium's FrozenLake-v1."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from agentrl_jax.envs.base import environment, of_pool
from agentrl_jax.envs.boards import FORMATS, ROWS_ONLY, Board, coordinates
from agentrl_jax.envs.frozen_lake.levels import (
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
PLAYERS = {PLAYER: 'Player', ON_GOAL: 'Player on goal', IN_HOLE: 'Player in hole'}

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
class FrozenLake(Board):
    """Reach the goal; a hole ends the episode. Reward 1 at the goal, else 0.

    A move goes in the intended direction with probability success_rate, and to each side with half
    of the remaining probability (gymnasium).
    """

    size: Annotated[int, In(2, 8)] = 4  # side of the map
    observation_format: Annotated[str, NameIn(FORMATS)] = 'grid'  # cells (' P _'): for BPE
    frozen: Annotated[float, SHARE] = of_pool(0.8)  # probability that a cell is ice (RAGEN: or .9)
    success_rate: Annotated[float, SHARE] = of_pool(1.0 / 3.0)  # probability of the intended move

    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('Left', 'Down', 'Right', 'Up')
    CELL_NAMES: ClassVar[tuple[str, ...]] = CELL_NAMES
    TEXTS: ClassVar[tuple[str, str]] = INSTRUCTION, COORD_INSTRUCTION
    ENTITIES: ClassVar[tuple[str, ...]] = ('start', 'goal', 'player', 'holes')
    REWARD_QUANTUM: ClassVar[float] = 1.0
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    name: ClassVar[str] = 'frozen_lake'
    symbols: ClassVar[str] = SYMBOLS
    RULES = (  # coordinates need one line per set of holes: 2 ** 16 at size 4, 2 ** 25 at size 5
        Rule({'observation_format': set(ROWS_ONLY), 'size': In(high=4)}),
    )

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

    @property
    def side(self) -> int:
        return self.size

    def rows(self) -> Iterator[list[str]]:
        places = range(self.size + 1)  # the last: in another row
        for holes, goal, player in itertools.product(range(2**self.size), places, places):
            row = ['O' if holes >> k & 1 else '_' for k in range(self.size)]
            if goal < self.size:
                row[goal] = 'G'
            if player < self.size:
                row[player] = {'_': 'P', 'O': 'X', 'G': '√'}[row[player]]
            yield row

    def row_index(self, state: EnvState) -> jax.Array:
        n = self.size
        holes = (state.board == HOLE).astype(jnp.int32) @ (1 << np.arange(n))
        is_goal = state.board == GOAL
        goal = jnp.where(is_goal.any(1), jnp.argmax(is_goal, 1), n)
        row, column = jnp.divmod(state.position, n)
        player = jnp.where(jnp.arange(n) == row, column, n)
        return (holes * (n + 1) + goal) * (n + 1) + player

    def entity_lines(self) -> dict[str, list[str]]:
        cells = [(r, c) for r in range(self.size) for c in range(self.size)]
        sets = [
            [x for k, x in enumerate(cells) if bits >> k & 1] for bits in range(2 ** len(cells))
        ]
        return {
            'start': [f'Start: {cell}\n' for cell in cells],
            'goal': [f'Goal: {cell}\n' for cell in cells],
            'player': [f'{player}: {cell}\n' for player in PLAYERS.values() for cell in cells],
            'holes': [f'Holes: {coordinates(holes)}\n' for holes in sets[1:]],
        }

    def entity_index(self, state: EnvState) -> list[tuple[Any, Any]]:
        flat, tile = state.board.reshape(-1), self._tile(state)
        kind = jnp.where(tile == GOAL, 1, jnp.where(tile == HOLE, 2, 0))
        holes = (flat == HOLE).astype(jnp.int32) @ (1 << np.arange(self.size**2))
        return [
            (jnp.argmax(flat == START), True),
            (jnp.argmax(flat == GOAL), True),
            (kind * self.size**2 + state.position, True),
            (holes - 1, holes > 0),
        ]

    def entity_text(self, state: EnvState, codes: np.ndarray) -> str:
        board, where = np.asarray(state.board), divmod(int(state.position), self.size)
        text = f'Start: {coordinates(np.argwhere(board == START))}\n'
        text += f'Goal: {coordinates(np.argwhere(board == GOAL))}\n'
        text += f'{PLAYERS[int(codes[where])]}: {where}\n'
        if (board == HOLE).any():
            text += f'Holes: {coordinates(np.argwhere(board == HOLE))}\n'
        return text

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
