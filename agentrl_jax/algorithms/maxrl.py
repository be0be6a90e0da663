"""MaxRL: weights groups by the inverse of their success rate, as maximum likelihood does.

  A[b, t] = (R_b - mean) / mean over the healthy members of the group; 0 if the mean is 0
For rewards of 0 and 1 the expected gradient is that of log p(success), to the order of the group
size (arXiv:2602.02710). GRPO without the division has the gradient of p; GRPO is in between.
Returns must not be negative: environments with negative rewards and penalties are rejected. A group
with a return of 0 contributes nothing.
"""

import dataclasses

import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL_IN_LOSS, ClippedSurrogate, build_batch, trained
from agentrl_jax.settings.rules import Rule, must

WHY = 'returns are divided by the mean of their group, so they must not be negative'


@dataclasses.dataclass(frozen=True)
class MaxRL(ClippedSurrogate):
    RULES = (
        Rule({'env.format_penalty': 0}, WHY),
        Rule(KL_IN_LOSS, WHY),
        must(
            'env.name',
            'environments without negative rewards',
            lambda run: all(getattr(w, 'REWARD_BOUNDS', (0.0,))[0] >= 0 for w in run.worlds),
        ),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.episode_returns(rollout, scores, mask)
        centred = adv.group_center(returns, rows, group_size=group_size, scale=scale)
        mean = adv.group_mean(returns, rows, group_size=group_size)
        earned = adv.drop_rounding(mean, adv.group_mean(scale, rows, group_size=group_size)) > 0
        per_episode = jnp.where(earned, centred / jnp.where(earned, mean, 1.0), 0.0)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)
