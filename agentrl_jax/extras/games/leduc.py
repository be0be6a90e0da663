"""Leduc Hold'em of pgx, a poker game with six cards, against random play or in self-play."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.extras.games.base import EnvParams, EnvState, TwoPlayers
from agentrl_jax.extras.games.pieces import Choice, Layout, Number, Offers

CARDS = ('J', 'Q', 'K')


@dataclasses.dataclass(frozen=True)
class Leduc(TwoPlayers):
    """Reward: chips won or lost. Observations hide the other player's card."""

    position: bool = False  # observations include who bets first; together with the chips of both
    # players this determines the bets of a round

    GAME: ClassVar[str] = 'leduc_holdem'
    PLIES: ClassVar[int] = 8
    ACTION_NAMES: ClassVar[tuple[str, ...]] = ('Call', 'Raise', 'Fold')
    REWARD_QUANTUM: ClassVar[float] = 1.0
    REWARD_BOUNDS: ClassVar[tuple[float, float]] = (-13.0, 13.0)
    name: ClassVar[str] = 'leduc'
    instruction: ClassVar[str] = (
        'Poker with two jacks, two queens and two kings. Each player holds one card; after the '
        'first round of bets a card is laid open. Whoever has its pair wins, else the higher card. '
        'Raise bets more, by 2 chips in the first round and 4 in the second, Call as much as the '
        'other player, Fold gives up.'
    )

    def layout(self) -> Layout:
        seats = ('1', '2') if self.short else ('You bet first', 'You bet second')
        position = (Choice(seats),) if self.position else ()
        if self.short:
            cards = Choice(CARDS), Choice(('.', *CARDS))
            return Layout(*cards, Number('+', 2), Number('-', 2), *position)
        held = Choice(tuple(f'You hold {card}' for card in CARDS))
        open_card = Choice(('No card is open', *(f'{card} is open' for card in CARDS)))
        chips = (Number('Your chips: ', 2), Number('Chips of the other player: ', 2))
        return Layout(held, open_card, *chips, *position, Offers(self.ACTION_NAMES))

    def values(self, game: Any) -> tuple[Any, ...]:
        agent = game.current_player if self.opponent == 'self' else jnp.int32(0)  # also at the end
        features = self.game().observe(game.replace(current_player=agent))
        bits = features.astype(jnp.int32)
        open_card = jnp.max(bits[3:6] * jnp.arange(1, 4))
        chips = jnp.argmax(bits[6:20]), jnp.argmax(bits[20:34])
        position = (agent != self.first(game),) if self.position else ()
        values = (jnp.argmax(bits[:3]), open_card, *chips, *position)
        return values if self.short else (*values, game.legal_action_mask)

    def first(self, game: Any) -> jax.Array:
        return game._first_player

    def plans(
        self, states: EnvState, used: np.ndarray, max_actions: int, params: EnvParams
    ) -> list[list[int]]:
        """Raise whenever possible, else call.

        No player wins more often against random play, which folds at least a third of the time when
        it has to pay. A player could win more chips with a jack or a queen.
        """
        raises = np.asarray(states.game.legal_action_mask)[:, 1]
        return [[int(on_offer)] for on_offer in raises]
