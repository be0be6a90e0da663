"""REINFORCE++ with a group baseline: centred in the group, whitened over the batch.

  A[b, t] = whiten(R_b - mean of the group): with the std of the batch, not of the group
arXiv:2501.03262, the baseline variant of OpenRLHF and verl. The KL is a small loss term, k2.
"""

import dataclasses

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import recursions
from agentrl_jax.rl.algorithm import KL, ClippedSurrogate, build_batch, trained


@dataclasses.dataclass(frozen=True)
class ReinforcePPBaseline(ClippedSurrogate):
    kl: KL = KL(1e-5, estimator='k2')

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.episode_returns(rollout, scores, mask)
        centred = adv.group_center(returns, rows, group_size=group_size, scale=scale)
        return build_batch(rollout, scores, mask, recursions.whiten(centred[:, None] * mask, mask))
