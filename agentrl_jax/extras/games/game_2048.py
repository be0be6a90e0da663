"""2048 of pgx: slide tiles until one has the goal number."""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.games import experts
from agentrl_jax.extras.games.base import EnvParams, EnvState, PgxWorld
from agentrl_jax.extras.games.pieces import Grid, Layout, Offers
from agentrl_jax.settings.marks import ONE
from agentrl_jax.settings.rules import must

TILES = ('.', *(str(2**n) for n in range(1, 18)))
EXPONENTS = tuple('.123456789ABCDEFGH')


@dataclasses.dataclass(frozen=True)
class Game2048(PgxWorld):
    """Reward: the merged tiles, as a share of the tile that ends the game."""

    goal: Annotated[int, ONE] = 32  # number of the tile that ends the game

    GAME: ClassVar[str] = '2048'
    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('Left', 'Up', 'Right', 'Down')
    REWARD_QUANTUM: ClassVar[float] = 0.01
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (0.0, 4.0)
    REWARDS_ROUNDED: ClassVar[bool] = True
    name: ClassVar[str] = 'game_2048'
    RULES = (
        must(
            'goal',
            'a power of two of at least 8',
            lambda world: world.goal >= 8 and not world.goal & (world.goal - 1),
        ),
    )

    @property
    def instruction(self) -> str:
        return (
            'Tiles slide as far as they can; two that show the same number and meet become one of '
            f'twice the number. A new tile appears after each move. Make a tile of {self.goal}.'
            f'{self.short * " Tiles of 2, 4, 8, ... are shown as 1, 2, 3, ..."}'
        )

    def turn(self, key: jax.Array, game: Any, action: jax.Array) -> tuple[Any, jax.Array]:
        after, merged = super().turn(key, game, action)
        return after, merged / self.goal

    def is_terminated(self, state: EnvState, params: EnvParams) -> jax.Array:
        return state.game.terminated | self.success(state, params)

    def success(self, state: EnvState, params: EnvParams) -> jax.Array:
        return 2 ** jnp.max(jnp.argmax(state.game.observation, -1)) >= self.goal

    def layout(self) -> Layout:
        board = Grid(EXPONENTS if self.short else TILES, 4, 4, self.blank)
        return Layout(*(board, Offers(self.ACTION_NAMES))[: 2 - self.short])

    def values(self, game: Any) -> tuple[Any, ...]:
        return (jnp.argmax(game.observation, -1), game.legal_action_mask)[: 2 - self.short]

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        return experts.best_slides(states.game, self.goal.bit_length() - 1)
