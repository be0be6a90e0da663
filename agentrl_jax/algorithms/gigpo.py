"""GiGPO: an episode advantage plus a turn advantage among turns from the same state.

  A[b, k] = A_E + A_S;  A_E = (R_b - mean) / F over the group
  A_S = (G_k - mean) / F over turns of the group with the same observation
G_k = sum_{l >= k} gamma^(l-k) r_l; F is 1 (norm 'mean', the default) or the std ('std');
gamma 0.95 (arXiv:2505.10978). A turn with a unique observation has A_S = 0. Two states are the same
if their observations are, at any turn (Rollout.anchor). Means are over episodes; the released
code's default is over steps, which gives long episodes more weight.
"""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import KL, ClippedSurrogate, build_batch, trained
from agentrl_jax.settings.marks import SHARE, ConfigName


@dataclasses.dataclass(frozen=True)
class GiGPO(ClippedSurrogate):
    kl: KL = KL(0.01)
    norm: Literal['std', 'mean'] = 'mean'  # normalisation in a group
    turn_gamma: Annotated[float, SHARE, ConfigName('turn_credit.turn_gamma')] = 0.95
    # discount per turn

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per turn."""
        rows, mask = trained(rollout, keep)
        reached = turn_credit.reached_turns(rollout.num_turns, rows, rollout.rewards.shape[1])
        of_turns = turn_credit.turn_rewards(self, rollout, scores, mask)
        rewards, scale = (jnp.where(reached, x, 0.0) for x in of_turns)
        to_go, to_go_scale = (
            turn_credit.discounted_to_go(
                x, jnp.zeros_like(x[:, 0]), rollout.num_turns, gamma=self.turn_gamma
            )
            for x in (rewards, scale)
        )
        comparison = dict(group_size=group_size, norm=self.norm)
        per_turn = turn_credit.step_advantages(
            to_go, rollout.anchor, reached, scale=to_go_scale, **comparison
        )
        episode = adv.compare(rewards.sum(1), rows, scale=scale.sum(1), **comparison)
        per_turn = per_turn + episode[:, None]
        return build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))
