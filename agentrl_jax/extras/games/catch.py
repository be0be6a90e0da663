"""Catch of gymnax (bsuite): move the paddle below the falling ball."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.games.base import BorrowedWorld, EnvParams, EnvState, library
from agentrl_jax.extras.games.pieces import Grid, Layout
from agentrl_jax.settings.marks import In


@dataclasses.dataclass(frozen=True)
class Catch(BorrowedWorld):
    """Reward 1 for a caught ball, -1 for a missed one."""

    rows: Annotated[int, In(low=2)] = 6  # rows of the board
    columns: Annotated[int, In(low=2)] = 5  # columns of the board

    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('Left', 'Stay', 'Right')
    REWARD_QUANTUM: ClassVar[float] = 1.0
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    name: ClassVar[str] = 'catch'
    instruction: ClassVar[str] = (
        'A ball (o) falls one row with each of your moves. Move the paddle (=) in the last row so '
        'that the ball falls on it.'
    )

    def game(self) -> Any:
        return _game(self.rows, self.columns)

    def start(self, key: jax.Array) -> Any:
        return self.game().reset_env(key, None)[1]

    def turn(self, key: jax.Array, game: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        return self.game().step_env(key, game, action, self.game().default_params)[1:3]

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.game.ball_y == self.rows - 1

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        caught = state.game.ball_x == state.game.paddle_x
        return self.is_terminated(state, params) & caught

    def layout(self) -> Layout:
        return Layout(Grid(('.', 'o', '='), self.rows, self.columns, self.blank))

    def values(self, game: Any) -> tuple[Any, ...]:
        board = jnp.zeros((self.rows, self.columns), jnp.int32).at[game.ball_y, game.ball_x].set(1)
        return (board.at[game.paddle_y, game.paddle_x].set(2),)

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Return plans that walk below the ball and wait for it."""
        game = jax.device_get(states.game)
        aside, left = game.ball_x - game.paddle_x, self.rows - 1 - game.ball_y
        moves = [[1 + int(np.sign(n))] * abs(int(n)) for n in aside]
        return [(row + [1] * int(n))[: int(n)] for row, n in zip(moves, left, strict=True)]


@functools.cache
def _game(rows: int, columns: int) -> Any:
    return library('gymnax.environments.bsuite.catch').Catch(rows=rows, columns=columns)
