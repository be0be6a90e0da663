"""Connect Four of pgx against an opponent who plays at random."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from agentrl_jax.envs.borrowed.base import PgxWorld
from agentrl_jax.envs.pieces import Choice, Grid, Layout, Offers


@dataclasses.dataclass(frozen=True)
class ConnectFour(PgxWorld):
    """Reward 1 for a row of four, -1 for one of the other player."""

    GAME: ClassVar[str] = 'connect_four'
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
        heads = Choice((' '.join(self.ACTION_NAMES),))
        return Layout(heads, Grid(('.', 'X', 'O'), 6, 7), Offers(self.ACTION_NAMES, 'Free:'))

    def told(self, game: Any) -> tuple[Any, ...]:
        planes = game.observation  # of whose turn it is; both are the agent's but at the end
        mine, theirs = jnp.where(game.current_player == 0, planes, planes[..., ::-1]).T
        return 0, (mine + 2 * theirs).T, game.legal_action_mask
