"""Connect Four of pgx, against random play or in self-play."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.games import experts
from agentrl_jax.extras.games.base import EnvParams, EnvState, TwoPlayers
from agentrl_jax.extras.games.pieces import Choice, Grid, Layout, Offers


@dataclasses.dataclass(frozen=True)
class ConnectFour(TwoPlayers):
    """Reward 1 for four in a row, -1 for four of the other player."""

    GAME: ClassVar[str] = 'connect_four'
    PLIES: ClassVar[int] = 42
    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('1', '2', '3', '4', '5', '6', '7')
    REWARD_QUANTUM: ClassVar[float] = 1.0
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    name: ClassVar[str] = 'connect_four'
    instruction: ClassVar[str] = (
        'You and another player drop discs into the seven columns of a board; a disc falls to the '
        'lowest free place. Yours are X. Whoever first has four in a row, a column or a diagonal '
        'wins. An answer is the number of a column.'
    )

    def layout(self) -> Layout:
        symbols = ('.', 'X', 'o')
        if self.short:
            return Layout(Grid(symbols, 6, 7, self.blank, trimmed=True))
        heads = Choice((' '.join(self.ACTION_NAMES),))
        return Layout(heads, Grid(symbols, 6, 7), Offers(self.ACTION_NAMES, 'Free:'))

    def values(self, game: Any) -> tuple[Any, ...]:
        planes = game.observation  # of the player to move: the agent, except at the end
        agent_moves = (game.current_player == 0) | (self.opponent == 'self')
        mine, theirs = jnp.where(agent_moves, planes, planes[..., ::-1]).T
        board = (mine + 2 * theirs).T
        return (board,) if self.short else (0, board, game.legal_action_mask)

    def first(self, game: Any) -> jax.Array:
        return jnp.where(game._x.color == 0, game.current_player, 1 - game.current_player)

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Return plans of one disc: see experts.best_columns."""
        mine, theirs = np.moveaxis(np.asarray(states.game.observation), -1, 0)  # the agent's turn
        return [[int(column)] for column in experts.best_columns(mine, theirs)]
