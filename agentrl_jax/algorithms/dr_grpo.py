"""Dr.GRPO: GRPO without the division by the group's std (arXiv:2503.20783).

  A[b, t] = R_b - mean over the healthy members of the group
The second part of the paper, a constant instead of each row's length, is
aggregation='token_sum_norm'. Its norm_length is the most tokens that an episode can sample.
"""

import dataclasses

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import ClippedSurrogate, Weights, build_batch, trained


@dataclasses.dataclass(frozen=True)
class DrGRPO(ClippedSurrogate):
    weights: Weights = Weights('token_sum_norm')

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.episode_returns(rollout, scores, mask)
        per_episode = adv.group_center(returns, rows, group_size=group_size, scale=scale)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)
