"""REINFORCE++: whitened reward-to-go, no critic and no groups (arXiv:2501.03262).

  A_t = sum_{n >= t} gamma^(n-t) r_n over action tokens, whitened over the batch's trained tokens
gamma is per action token: observations do not discount. (verl zeroed everything before an
observation, AgentGym-RL put the reward on a masked token; both train nothing.) With reward_on
'turn' a turn gets the rewards from this turn on, with 'episode' the full return. The KL to the
initial policy is subtracted from the reward of each token.
"""

import dataclasses
from typing import Annotated, Literal

from agentrl_jax.rl import recursions
from agentrl_jax.rl.algorithm import KL, ClippedSurrogate, build_batch, trained
from agentrl_jax.rl.recursions import token_rewards
from agentrl_jax.settings.marks import SHARE, Neutral


@dataclasses.dataclass(frozen=True)
class ReinforcePP(ClippedSurrogate):
    kl: KL = KL(0.01, 'reward')
    gamma: Annotated[float, SHARE, Neutral(1.0)] = 1.0  # discount per action token
    reward_on: Annotated[Literal['turn', 'episode'], Neutral('turn')] = 'turn'
    # turn: each reward at the end of its turn; episode: the return at the last token

    COMPARES_GROUPS = False

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per token."""
        _, mask = trained(rollout, keep)
        rewards = token_rewards(rollout, mask, reward_on=self.reward_on)
        rewards = rewards - self.token_kl(scores, mask)[0]
        to_go = recursions.rewards_to_go(rewards, mask, gamma=self.gamma)
        _, scale = self.episode_returns(rollout, scores, mask)
        return build_batch(
            rollout, scores, mask, recursions.whiten(to_go, mask, scale=scale[:, None])
        )
