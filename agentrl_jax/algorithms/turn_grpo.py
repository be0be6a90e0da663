"""Turn GRPO: what a turn still earned against what the others still earned, a stop counting as 0.

  A[b, k] = s (G[b, k] - mean over the other healthy members c of the group of G[c, k])
  G[b, k] = sum_{l >= k} r[b, l], 0 for turns that were not taken
r are environment rewards and format penalties, less the KL where that is in the reward. The mean
contains nothing of episode b, so in expectation it adds nothing to the policy gradient; and since
members that had stopped count with the 0 that they earned, what going on earns reaches the decision
to go on. Comparing turn k among those that reached it (mt_grpo) takes the value of having reached
it out of every advantage: the decision to stop is then rewarded or punished for nothing.

Nothing is assumed of the states that other members met at turn k, and it needs no critic and no
further samples. Where turns pay, its variance is the least of all that have no bias; where all is
paid at the end, members that stopped before are a poor baseline, and one advantage an episode
(rloo) has a little less: benchmarks/turn_credit.md.

s ('rms') divides all advantages of a batch by one number, their root mean square over the trained
tokens; 'none' leaves them in units of the return. token_mean divides by one number too, where a
division by the episode's own length (seq_mean_token_mean) would favour lengths. All this is said of
the first optimiser step on a rollout; later ones have the ratio and clip range of every algorithm.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import Clipped, build_batch, trained
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.settings.marks import At


@dataclasses.dataclass(frozen=True)
class TurnGRPO(Clipped):
    scale: Annotated[Literal['rms', 'none'], At('turn_credit.scale')] = 'rms'  # advantages by their
    # rms in the batch (rms) or in units of the return (none)

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per turn."""
        rows, mask = trained(rollout, keep)
        rewards, scale = self.turn_rewards(rollout, scores, mask, kl_coef)
        per_turn = turn_credit.against_others(
            rewards, rollout.num_turns, rows, group_size=group_size, scale=scale
        )
        advantages = self.scaled(adv.to_tokens(per_turn, rollout.turn, mask), mask)
        return build_batch(rollout, scores, mask, advantages)

    def scaled(self, advantages: jax.Array, mask: jax.Array) -> jax.Array:
        """Advantages [B, T] over their root mean square on the mask, or as they are."""
        if self.scale == 'none':
            return advantages
        size = jnp.sqrt(masked_mean(advantages**2, mask))
        return jnp.where(size == 0, 0.0, advantages / size)
