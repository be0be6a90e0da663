"""MaxRL: groups weigh by how seldom they succeed, as maximum likelihood would (arXiv:2602.02710).

  A[b, t] = (R_b - mean) / mean over the healthy members of the group; 0 where mean <= 1e-5
For rewards of 0 and 1 the expected gradient is that of log p(success) to the order of the group's
size, where GRPO without division is that of p and GRPO's own lies between. It is for returns that
are not negative; a group that earned nothing, or lost, says nothing.
"""

import dataclasses

import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import Clipped, build_batch, trained


@dataclasses.dataclass(frozen=True)
class MaxRL(Clipped):
    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns = self.episode_returns(rollout, scores, mask, kl_coef)
        centred = adv.group_center(returns, rows, group_size=group_size)
        mean = adv.group_mean(returns, rows, group_size=group_size)
        earned = mean > adv.MIN_STD  # a mean below this is the rounding of returns that cancel
        per_episode = jnp.where(earned, centred / jnp.where(earned, mean, 1.0), 0.0)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)
