"""SAO: one episode of each prompt, a critic, and a ratio to the sampler (arXiv:2607.07508).

  loss_t = -f(r) A,  r = pi / pi_rollout of the token
  f(r) = r for 1 - clip_low < r < 1 + clip_high, else 0 ('DIS')
  A = GAE over action tokens, from the last of an answer to the first of the next, with
  lam = 1 - 1 / (lam_alpha l), l tokens that the episode sampled; critic target = reward to go.
No pi_old is computed: what is stale and what the sampler rounds are one ratio, whose bounds are
wide (.3 and 5) and drop a token on either side, whatever its advantage. Dropped tokens stay in the
denominator. The paper writes sg(f(r)) A log pi, whose gradient is the same.

For a batch of one episode a prompt set rollout.group_size=1; for its two steps of the critic to one
of the policy critic.updates=2, for its ten steps of the critic alone critic.warmup_steps=10, for a
critic's rate of five times the policy's optim.critic_lr, for its critic whose attention is frozen
critic.freeze_attention. Not here: a critic that was trained before, and play that goes on while the
policy learns. The authors gave no code; UniRL's and reef's were read beside the equations. Reef's
critic learns A + V at the same lam, the paper's reward to go, as here. Advantages are not whitened.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import (
    Exploring,
    Range,
    build_batch,
    token_rewards,
    trained,
)
from agentrl_jax.settings.marks import POSITIVE, SHARE, Off
from agentrl_jax.settings.rules import Rule
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class SAO(Exploring):
    clip: Range = Range(0.3, 5.0)
    gamma: Annotated[float, SHARE, Off(1.0)] = 1.0  # discount, per action token
    lam_alpha: Annotated[float, POSITIVE] = 1.5  # lambda of GAE is 1 - 1 / (this x the tokens that
    # an episode sampled)
    reward_on: Annotated[Literal['turn', 'episode'], Off('turn')] = 'turn'  # turn: each reward at
    # its turn's end; episode: all at the last

    RULES = (Rule({'loss.sampler_correction': 'off'}, 'its ratio is to the sampler'),)
    USES_CRITIC = True
    COMPARES_GROUPS = False

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """Advantages and critic targets."""
        rows, mask = trained(rollout, keep)
        rewards = token_rewards(rollout, mask, reward_on=self.reward_on)
        rewards = rewards - self.token_kl(scores, mask, kl_coef)[0]
        lam = adaptive_lambda(mask.sum(1, keepdims=True), self.lam_alpha)
        advantages = adv.gae(rewards, scores.values, mask, gamma=self.gamma, lam=lam)
        returns = adv.rewards_to_go(rewards, mask, gamma=self.gamma)
        return build_batch(rollout, scores, mask, advantages, returns=returns)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        inside = (ratio > 1.0 - self.clip.low) & (ratio < 1.0 + self.clip.high)
        advantages = jnp.where(batch.mask, batch.advantages, 0.0)
        return -jnp.where(inside, ratio, 0.0) * advantages

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Tokens that left the loss, whatever the sign of their advantage; bool [B, T]."""
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        return {
            'policy/clip_frac_high': ratio >= 1.0 + self.clip.high,
            'policy/clip_frac_low': ratio <= 1.0 - self.clip.low,
        }


def adaptive_lambda(length: jax.Array, alpha: float) -> jax.Array:
    """1 - 1 / (alpha length), at least 0 (VAPO, arXiv:2504.05118); of lengths int32 [B, 1]."""
    return jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(length, 1)), 0.0)
