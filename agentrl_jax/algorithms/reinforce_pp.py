"""REINFORCE++: whitened reward-to-go, no critic and no groups (arXiv:2501.03262).

  A_t = sum_{n >= t} gamma^(n-t) r_n over action tokens, whitened over the batch's trained tokens
gamma is per action token: observations in between do not discount (verl zeroed everything before an
observation, AgentGym-RL put the reward on a masked token; both train nothing). reward_on 'turn'
gives each turn the rewards from itself on, 'episode' the whole return. The KL to the start policy
is taken off the reward of each token.
"""

import jax

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ('gamma', 'reward_on')
DEFAULTS = common.DEFAULTS | {
    'loss.kl_coef': 0.01,
    'loss.kl_in': 'reward',
    'loss.gamma': 1.0,
    'loss.reward_on': 'turn',
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
    gamma: float = 1.0,
    reward_on: str = 'turn',
) -> Batch:
    """Advantages of a rollout; keep bool [B] marks the rows a filter kept."""
    del group_size
    _, mask = common.trained(rollout, keep)
    rewards = common.token_rewards(rollout, mask, reward_on=reward_on)
    rewards = rewards - common.token_kl(scores, mask, kl_coef, kl_in_reward)
    to_go = adv.rewards_to_go(rewards, mask, gamma=gamma)
    return common.build_batch(rollout, scores, mask, adv.whiten(to_go, mask))
