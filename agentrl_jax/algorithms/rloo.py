"""RLOO: the return less the mean of the group's other members (arXiv:2402.14740).

A[b, t] = R_b - mean of the other healthy members = (R_b - mean) n / (n - 1)
R is less its KL to the start policy, and an episode is one action: the loss sums over its tokens
(aggregation='seq_mean_token_sum'). The paper has no ratio: at the first optimiser step on a rollout
there is none here either, later ones clip those of tokens.
"""

import jax

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ()
DEFAULTS = common.DEFAULTS | {
    'loss.kl_coef': 0.05,
    'loss.kl_in': 'reward',
    'loss.aggregation': 'seq_mean_token_sum',
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
) -> Batch:
    """One advantage per episode; keep bool [B] marks the rows a filter kept."""
    rows, mask = common.trained(rollout, keep)
    returns = common.episode_returns(rollout, scores, mask, kl_coef, kl_in_reward)
    per_episode = adv.leave_one_out(returns, rows, group_size=group_size)
    return common.build_batch(rollout, scores, mask, per_episode[:, None] * mask)
