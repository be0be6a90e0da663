"""GRPO: the group-normalised return of an episode on all of its action tokens (arXiv:2402.03300).

  A[b, t] = (R_b - mean) / (std + eps) over the healthy members of the group
std is unbiased, eps 1e-6; norm 'mean' omits the division (Dr.GRPO), 'none' omits both.
R is the return with format penalties, minus kl_coef * sum of k1 for a KL in the reward. All
episodes have the same weight (seq_mean_token_mean). The KL loss is .04 k3 (RAGEN .001). GRPO-MR of
MT-GRPO is this with its turn rewards. If actions cost, the std teaches the policy to act less
(README.md).
"""

import dataclasses

import jax

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL, ClippedSurrogate, Comparison, Weights, build_batch, trained
from agentrl_jax.types import Rollout, Scores


@dataclasses.dataclass(frozen=True)
class GRPO(ClippedSurrogate):
    kl: KL = KL(0.04)
    weights: Weights = Weights('seq_mean_token_mean')
    comparison: Comparison = Comparison()

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.returns(rollout, scores, mask)
        comparison = dataclasses.asdict(self.comparison)
        per_episode = adv.compare(returns, rows, group_size=group_size, scale=scale, **comparison)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)

    def returns(
        self, rollout: Rollout, scores: Scores, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (the quantity compared in a group, its rounding scale); [B]."""
        return self.episode_returns(rollout, scores, mask)
