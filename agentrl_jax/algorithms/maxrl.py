"""MaxRL: groups weigh by how seldom they succeed, as maximum likelihood would (arXiv:2602.02710).

  A[b, t] = (R_b - mean) / mean over the healthy members of the group; 0 where the mean is 0
For rewards of 0 and 1 the expected gradient is that of log p(success) to the order of the group's
size, where GRPO without division is that of p and GRPO's own lies between. It is for returns that
are not negative: worlds and penalties that take something are refused. A group that earned nothing
says nothing.
"""

import dataclasses

import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL_IN_LOSS, Clipped, build_batch, trained
from agentrl_jax.settings.rules import Rule, must

WHY = 'returns are divided by the mean of their group, so they must not be negative'


@dataclasses.dataclass(frozen=True)
class MaxRL(Clipped):
    RULES = (
        Rule({'env.format_penalty': 0}, WHY),
        Rule(KL_IN_LOSS, WHY),
        must(
            'env.name',
            'worlds without negative rewards',
            lambda run: all(getattr(w, 'REWARD_BOUNDS', (0.0,))[0] >= 0 for w in run.worlds),
        ),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.episode_returns(rollout, scores, mask, kl_coef)
        centred = adv.group_center(returns, rows, group_size=group_size, scale=scale)
        mean = adv.group_mean(returns, rows, group_size=group_size)
        earned = adv.drop_rounding(mean, adv.group_mean(scale, rows, group_size=group_size)) > 0
        per_episode = jnp.where(earned, centred / jnp.where(earned, mean, 1.0), 0.0)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)
