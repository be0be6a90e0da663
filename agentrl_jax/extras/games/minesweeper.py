"""Minesweeper, without a library: open every cell that has no mine.

The mines define a game: there are 120 boards with two mines and 560 with three. Splits have
different seeds, but the same boards.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.games import experts
from agentrl_jax.extras.games.base import BorrowedWorld, EnvParams, EnvState
from agentrl_jax.extras.games.pieces import Grid, Layout
from agentrl_jax.settings.marks import In
from agentrl_jax.settings.rules import Rule

SIDE, CELLS, AROUND = 4, 16, experts.around(4)
Game = tuple[jax.Array, jax.Array]  # bool [16] each: mines, open cells


@dataclasses.dataclass(frozen=True)
class Minesweeper(BorrowedWorld):
    """Reward 1 when all cells without a mine are open, -1 for a mine. One cell starts open."""

    mines: Annotated[int, In(1, CELLS - 1)] = 3  # number of mines in 16 cells

    ACTION_NAMES: ClassVar[tuple[str, ...]] = tuple(f'{a}{n}' for n in '1234' for a in 'ABCD')
    REWARD_QUANTUM: ClassVar[float] = 1.0
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    name: ClassVar[str] = 'minesweeper'
    instruction: ClassVar[str] = (
        'Open all cells (.) that hide no mine; C2 is the third one of the second row. An open cell '
        'shows how many of the cells around it have a mine; those around a 0 are opened with it.'
    )
    RULES = (Rule({'mines': In(high=CELLS - 2)}, 'one cell starts open'),)

    def start(self, key: jax.Array) -> Game:
        mines = jax.random.permutation(key, CELLS) < self.mines
        return mines, jnp.arange(CELLS) == jnp.argmin(9 * mines + AROUND @ mines)  # a 0 if any

    def turn(self, key: jax.Array, game: Game, action: jax.Array) -> tuple[Game, jax.Array]:
        mines, opened = game[0], spread(game[0], game[1].at[action].set(True))
        reward = jnp.where(jnp.any(mines & opened), -1.0, 1.0)
        return (mines, opened), over(mines, opened) * reward

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return over(*state.game)

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        return jnp.all(state.game[0] ^ state.game[1])

    def offers(self, game: Game) -> jax.Array:
        return ~game[1]

    def layout(self) -> Layout:
        return Layout(Grid(tuple('.012345678*'), SIDE, SIDE, self.blank))

    def values(self, game: Game) -> tuple[Any, ...]:
        return (jnp.where(game[1], jnp.where(game[0], 10, 1 + AROUND @ game[0]), 0),)

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        return experts.safest_cells(*states.game, self.mines)


def over(mines: jax.Array, opened: jax.Array) -> jax.Array:
    """Whether a mine or all other cells are open; bool []."""
    return jnp.any(mines & opened) | jnp.all(mines | opened)


def spread(mines: jax.Array, opened: jax.Array) -> jax.Array:
    """Open the cells around each open 0 (at the start only after the first action); bool [16]."""
    for _ in range(CELLS):
        opened = opened | (AROUND @ (opened & ~mines & (AROUND @ mines == 0)) > 0)
    return opened
