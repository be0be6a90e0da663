"""GiGPO: an episode's advantage plus that of each turn among turns from the same state.

  A[b, k] = A_E + w A_S;  A_E = (R_b - mean) / F over the group
  A_S = (G_k - mean) / F over turns of the group with the same observation
G_k = sum_{l >= k} gamma^(l-k) r_l; F is 1 (norm 'mean', the default) or the std ('std');
gamma 0.95, w = 1 (arXiv:2505.10978). A turn whose observation nobody else saw has A_S = 0.
States are the same when the world is observed to be the same, at whatever turn (Rollout.anchor);
episode means run over episodes (the released code's default runs over steps, so there long episodes
weigh more).
"""

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective, turn_credit
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ('step_coef', 'turn_gamma', 'norm')
DEFAULTS = common.DEFAULTS | {
    'loss.kl_coef': 0.01,
    'loss.norm': 'mean',
    'turn_credit.turn_gamma': 0.95,
    'turn_credit.step_coef': 1.0,
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
    step_coef: float = 1.0,
    turn_gamma: float = 0.95,
    norm: str = 'mean',
) -> Batch:
    """One advantage per turn; keep bool [B] marks the rows a filter kept."""
    rows, mask = common.trained(rollout, keep)
    turns = rollout.rewards.shape[1]
    played = turn_credit.turns_played(rollout.num_turns, rows, turns)
    kl = common.token_kl(scores, mask, kl_coef, kl_in_reward)
    rewards = rollout.rewards + rollout.penalties
    rewards = rewards - adv.per_turn(kl, rollout.turn, mask, turns=turns)
    rewards = jnp.where(played, rewards, 0.0)
    to_go = turn_credit.discounted_to_go(
        rewards, jnp.zeros_like(rewards[:, 0]), rollout.num_turns, gamma=turn_gamma
    )
    per_turn = step_coef * turn_credit.step_advantages(
        to_go, rollout.anchor, played, group_size=group_size, norm=norm
    )
    episode = adv.compare(rewards.sum(1), rows, group_size=group_size, norm=norm)
    per_turn = per_turn + episode[:, None]
    return common.build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))
