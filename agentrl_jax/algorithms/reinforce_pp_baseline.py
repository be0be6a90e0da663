"""REINFORCE++ with a group baseline: centred in the group, whitened over the batch.

  A[b, t] = whiten(R_b - mean of the group): the std is the batch's, not the group's
(arXiv:2501.03262, the baseline form of OpenRLHF and verl.) The KL is a small term of the loss, k2.
"""

import jax

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ()
DEFAULTS = common.DEFAULTS | {'loss.kl_coef': 1e-5, 'loss.kl_estimator': 'k2'}
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
    centred = adv.group_center(returns, rows, group_size=group_size)[:, None] * mask
    return common.build_batch(rollout, scores, mask, adv.whiten(centred, mask))
