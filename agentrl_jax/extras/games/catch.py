"""Catch of gymnax (bsuite): move the paddle below the falling ball."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from agentrl_jax.extras.games import experts
from agentrl_jax.extras.games.base import BorrowedWorld, EnvState, library
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

    def over(self, game: Any) -> jax.Array:
        return game.ball_y == self.rows - 1

    def won(self, state: EnvState) -> jax.Array:
        return self.over(state.game) & (state.game.ball_x == state.game.paddle_x)

    def layout(self) -> Layout:
        return Layout(Grid(('.', 'o', '='), self.rows, self.columns, self.blank))

    def values(self, game: Any) -> tuple[Any, ...]:
        board = jnp.zeros((self.rows, self.columns), jnp.int32).at[game.ball_y, game.ball_x].set(1)
        return (board.at[game.paddle_y, game.paddle_x].set(2),)

    def best(self, states: EnvState) -> list[list[int]]:
        return experts.walks(states.game, self.rows)


@functools.cache
def _game(rows: int, columns: int) -> Any:
    return library('gymnax.environments.bsuite.catch').Catch(rows=rows, columns=columns)
