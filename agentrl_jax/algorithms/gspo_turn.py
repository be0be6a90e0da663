"""GSPO with one ratio per turn, on MT-GRPO's advantage per turn (gspo, mt_grpo).

Not from a paper. The clip ranges are GSPO's.
"""

import dataclasses

import jax

from agentrl_jax.algorithms.gspo import GSPO
from agentrl_jax.algorithms.mt_grpo import MTGRPO
from agentrl_jax.rl.algorithm import Clip, Weights
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class GSPOTurn(MTGRPO):
    clip: Clip = Clip(3e-4, 4e-4)
    weights: Weights = Weights('seq_mean_token_mean')

    log_ratios, loss = GSPO.log_ratios, GSPO.loss

    def segment(self, batch: Batch) -> jax.Array:
        """Return the turn of each token: the tokens of a turn share a ratio; int32 [B, T]."""
        return batch.turn
