"""GRPO: the group-normalised return of an episode on all of its action tokens (arXiv:2402.03300).

  A[b, t] = (R_b - mean) / (std + eps) over the healthy members of the group
std is unbiased, eps 1e-6; norm 'mean' leaves the division out (Dr.GRPO), 'none' both.
R is the return with format penalties (and, with KL in the reward, less kl_coef * sum of k1).
Rows weigh the same (seq_mean_token_mean), KL loss .04 by k3 (RAGEN .001); MT-GRPO's GRPO-MR is this
with its turn rewards.
"""

import dataclasses

import jax

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL, Clipped, Comparison, Weights, build_batch, trained
from agentrl_jax.types import Rollout, Scores


@dataclasses.dataclass(frozen=True)
class GRPO(Clipped):
    kl: KL = KL(0.04)
    weights: Weights = Weights('seq_mean_token_mean')
    comparison: Comparison = Comparison()

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per episode."""
        rows, mask = trained(rollout, keep)
        returns, scale = self.returns(rollout, scores, mask, kl_coef)
        comparison = dataclasses.asdict(self.comparison)
        per_episode = adv.compare(returns, rows, group_size=group_size, scale=scale, **comparison)
        return build_batch(rollout, scores, mask, per_episode[:, None] * mask)

    def returns(
        self, rollout: Rollout, scores: Scores, mask: jax.Array, kl_coef: jax.Array | float
    ) -> tuple[jax.Array, jax.Array]:
        """(what episodes are compared by, the scale of its rounding); [B]."""
        return self.episode_returns(rollout, scores, mask, kl_coef)
