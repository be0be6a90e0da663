"""GRPO: the group-normalised return of an episode on all of its action tokens (arXiv:2402.03300).

  A[b, t] = (R_b - mean) / (max(std, std_floor) + eps) over the healthy members of the group
std is unbiased, eps 1e-6, std_floor 0; norm 'mean' leaves the division out (Dr.GRPO), 'none' both.
R is the return with format penalties (and, with KL in the reward, less kl_coef * sum of k1).
Rows weigh the same (seq_mean_token_mean), KL loss .04 by k3 (RAGEN .001); MT-GRPO's GRPO-MR is this
with its turn rewards.
"""

import jax

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ('norm', 'eps', 'std_floor')
DEFAULTS = common.DEFAULTS | {
    'loss.kl_coef': 0.04,
    'loss.aggregation': 'seq_mean_token_mean',
    'loss.norm': 'std',
    'loss.eps': 1e-6,
    'loss.std_floor': 0.0,
}
loss = objective.clipped_loss
clipped = objective.clipped_tokens


def make_batch(
    rollout: Rollout,
    scores: Scores,
    *,
    group_size: int,
    keep: jax.Array | None = None,
    kl_coef: jax.Array | float = 0.0,
    kl_in_reward: bool = False,
    norm: str = 'std',
    eps: float = 1e-6,
    std_floor: float = 0.0,
) -> Batch:
    """One advantage per episode; keep bool [B] marks the rows a filter kept."""
    rows, mask = common.trained(rollout, keep)
    returns = common.episode_returns(rollout, scores, mask, kl_coef, kl_in_reward)
    per_episode = adv.compare(
        returns, rows, group_size=group_size, norm=norm, eps=eps, std_floor=std_floor
    )
    return common.build_batch(rollout, scores, mask, per_episode[:, None] * mask)
