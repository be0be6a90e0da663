"""Dr.GRPO: GRPO without the division by the group's std (arXiv:2503.20783).

  A[b, t] = R_b - mean over the healthy members of the group
The paper's second half, a constant instead of each row's length, is aggregation='token_sum_norm'
with norm_length, the most tokens that an episode can sample.
"""

import jax

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ()
DEFAULTS = common.DEFAULTS | {'loss.aggregation': 'token_sum_norm'}
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
    per_episode = adv.group_center(returns, rows, group_size=group_size)
    return common.build_batch(rollout, scores, mask, per_episode[:, None] * mask)
