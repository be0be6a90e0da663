"""SAO: one episode per prompt, a critic, and a ratio to the sampler (arXiv:2607.07508).

  loss_t = -f(r) A,  r = pi / pi_rollout of the token
  f(r) = r for 1 - clip_low < r < 1 + clip_high, else 0 ('DIS')
  A = GAE over action tokens, from the last of an answer to the first of the next, with
  lam = 1 - 1 / (lam_alpha l), l = sampled tokens of the episode; critic target = reward to go.
No pi_old is computed: one ratio covers both staleness and the sampler's rounding. Its bounds are
wide (.3 and 5) and drop tokens on either side for any advantage. Dropped tokens stay in the
denominator. The paper writes sg(f(r)) A log pi, which has the same gradient.

The other settings of the paper are fields of a run: rollout.group_size=1, critic.updates=2 (critic
steps per policy step), critic.warmup_steps=10 (initial steps of the critic only), optim.critic_lr
of five times the policy's rate, and critic.freeze_attention.
A pretrained critic and rollouts during updates are not implemented. The authors released no code.
The code of UniRL and reef was compared with the equations. Reef's critic learns A + V at the same
lam; the paper's learns the reward to go, as here. Advantages are not whitened.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import losses, recursions
from agentrl_jax.rl.algorithm import Algorithm, Range, build_batch, trained
from agentrl_jax.rl.recursions import token_rewards
from agentrl_jax.settings.marks import POSITIVE, SHARE, Neutral
from agentrl_jax.settings.rules import Rule
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class SAO(Algorithm):
    clip: Range = Range(0.3, 5.0)
    gamma: Annotated[float, SHARE, Neutral(1.0)] = 1.0  # discount per action token
    lam_alpha: Annotated[float, POSITIVE] = 1.5  # lambda of GAE is 1 - 1 / (this x sampled tokens
    # of the episode)
    reward_on: Annotated[Literal['turn', 'episode'], Neutral('turn')] = 'turn'
    # turn: each reward at the end of its turn; episode: the return at the last token

    RULES = (Rule({'loss.sampler_correction': 'off'}, 'its ratio is relative to the sampler'),)
    USES_CRITIC = True
    COMPARES_GROUPS = False

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with advantages and critic targets."""
        rows, mask = trained(rollout, keep)
        rewards = token_rewards(rollout, mask, reward_on=self.reward_on)
        rewards = rewards - self.token_kl(scores, mask)[0]
        lam = adaptive_lambda(mask.sum(1, keepdims=True), self.lam_alpha)
        advantages = recursions.gae(rewards, scores.values, mask, gamma=self.gamma, lam=lam)
        returns = recursions.rewards_to_go(rewards, mask, gamma=self.gamma)
        return build_batch(rollout, scores, mask, advantages, returns=returns)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        inside = (ratio > 1.0 - self.clip.low) & (ratio < 1.0 + self.clip.high)
        advantages = jnp.where(batch.mask, batch.advantages, 0.0)
        return -jnp.where(inside, ratio, 0.0) * advantages

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Return the tokens dropped from the loss, for advantages of any sign; bool [B, T]."""
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        return {
            'policy/clip_frac_high': ratio >= 1.0 + self.clip.high,
            'policy/clip_frac_low': ratio <= 1.0 - self.clip.low,
        }


def adaptive_lambda(length: jax.Array, alpha: float) -> jax.Array:
    """1 - 1 / (alpha length), at least 0 (VAPO, arXiv:2504.05118); length int32 [B, 1]."""
    return jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(length, 1)), 0.0)
