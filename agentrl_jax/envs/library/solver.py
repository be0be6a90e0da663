"""The best player of the card catalogue (host)."""

import numpy as np

from agentrl_jax.envs.library.levels import PEOPLE


def next_action(cards: np.ndarray, start: int, seen: np.ndarray) -> int:
    """What the best player does: pull the next card of the chain, or name the box it ends in."""
    card = int(start)
    while card < len(PEOPLE):
        if not seen[card]:
            return card
        card = int(cards[card])
    return card
