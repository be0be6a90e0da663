"""Turn GRPO: compares the reward to go of each turn with all other members, 0 after they stop.

  A[b, k] = s (G[b, k] - mean over the other healthy members c of the group of G[c, k])
  G[b, k] = sum_{l >= k} r[b, l], 0 for turns that were not taken
r are environment rewards and format penalties, minus the KL if it is in the reward. The mean does
not depend on episode b, so in expectation it adds nothing to the policy gradient. Members that have
stopped count as 0, so the reward of further turns credits the decision to continue. Comparing turn
k only among members that reached it (mt_grpo) removes the value of reaching it from every
advantage: the decision to stop is then rewarded or punished without a reason.

The estimator makes no assumption about the states of other members at turn k. It needs no critic
and no further samples. With rewards in every turn it has the lowest variance of all unbiased
estimators. With a reward at the end only, members that stopped are a poor baseline, and one
advantage per episode (rloo) has slightly less variance: benchmarks/turn_credit.md.

s ('rms') divides all advantages of a batch by their root mean square over the trained tokens;
'none' leaves them in units of the return. token_mean also divides by one number, while a division
by the length of each episode (seq_mean_token_mean) would favour some lengths. All of this holds for
the first optimiser step of a rollout; later steps have the usual ratio and clip range.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import ClippedSurrogate, build_batch, trained
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.settings.marks import ConfigName


@dataclasses.dataclass(frozen=True)
class TurnGRPO(ClippedSurrogate):
    scale: Annotated[Literal['rms', 'none'], ConfigName('turn_credit.scale')] = 'rms'
    # rms divides the advantages by their rms in the batch, none leaves them in units of the return

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per turn."""
        rows, mask = trained(rollout, keep)
        rewards, scale = turn_credit.turn_rewards(self, rollout, scores, mask)
        per_turn = turn_credit.leave_one_out_to_go(
            rewards, rollout.num_turns, rows, group_size=group_size, scale=scale
        )
        advantages = self.scaled(adv.to_tokens(per_turn, rollout.turn, mask), mask)
        return build_batch(rollout, scores, mask, advantages)

    def scaled(self, advantages: jax.Array, mask: jax.Array) -> jax.Array:
        """Divide advantages [B, T] by their root mean square on the mask, if scale is 'rms'."""
        if self.scale == 'none':
            return advantages
        size = jnp.sqrt(masked_mean(advantages**2, mask))
        return jnp.where(size == 0, 0.0, advantages / size)
