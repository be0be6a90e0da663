"""RLOO: the return minus the mean of the other group members (arXiv:2402.14740).

A[b, t] = R_b - mean of the other healthy members = (R_b - mean) n / (n - 1)
The KL to the initial policy is subtracted from R. An episode is one action: the loss sums over its
tokens (aggregation='seq_mean_token_sum'). The paper has no ratio. Here the ratio is 1 at the first
optimiser step of a rollout; later steps clip token ratios.
"""

import dataclasses

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL, ClippedSurrogate, Weights, build_batch, trained


@dataclasses.dataclass(frozen=True)
class RLOO(ClippedSurrogate):
    kl: KL = KL(0.05, 'reward')
    weights: Weights = Weights('seq_mean_token_sum')

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.episode_returns(rollout, scores, mask)
        per_episode = adv.leave_one_out(returns, rows, group_size=group_size, scale=scale)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)
