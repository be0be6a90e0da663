"""OTB: the baseline of a token that makes the gradient vary least (arXiv:2602.07078).

  A[b, n] = G_b[n] - B[n],  B[n] = sum over the group of G W / sum of W
  W_b[n] = sum over m <= n of 1 - 2 pi_m + sum over the vocabulary of pi^2
n counts the tokens that an episode sampled: members are compared at equal n, whatever their turns
and observations. G is the reward to go. A term of W is |grad_logits log pi|^2 of a token, so that
W stands for the squared score of the beginning; a member whose beginning was a matter of course
says little about what the others should expect. pi is the policy before the update, among the
tokens that were allowed.

As verl's TIR_OPTIMAL_TOKEN_BASELINE: members that are over count no more, and where only one member
goes on B is 0, else its own return would cancel it; so B is 0 in groups of one. The baseline holds
the member's own return, a bias of order 1 / G. verl multiplies W by the squares of the weights of
truncated importance sampling, and this does not (loss.sampler_correction scales advantages alone).
"""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import Clipped, build_batch, token_rewards, trained

TINY = 1e-8  # in the denominator, as verl has it


@dataclasses.dataclass(frozen=True)
class OTB(Clipped):
    NEEDS_ENERGY = True

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per token."""
        _, mask = trained(rollout, keep)
        rewards = token_rewards(rollout, mask, reward_on='turn')
        rewards = rewards - self.token_kl(scores, mask, kl_coef)
        returns = adv.rewards_to_go(rewards, mask, gamma=1.0)
        energy = jnp.cumsum(jnp.where(mask, scores.energy, 0.0), axis=1)
        baseline = token_baseline(returns, energy, mask, group_size=group_size)
        return build_batch(rollout, scores, mask, returns - baseline)


def token_baseline(
    returns: jax.Array, energy: jax.Array, mask: jax.Array, *, group_size: int
) -> jax.Array:
    """B of each token in mask, 0 where no other member has as many; all [B, T]."""
    rows, length = jnp.arange(mask.shape[0])[:, None], mask.shape[1]
    number = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, length)  # n of a token; T = none

    def by_number(x):
        moved = jnp.zeros(mask.shape, jnp.float32).at[rows, number].set(x, mode='drop')
        return moved.reshape(-1, group_size, length)

    weight, there = by_number(jnp.where(mask, energy, 0.0)), by_number(mask)
    weighted = by_number(jnp.where(mask, returns, 0.0)) * weight
    best = weighted.sum(1) / (weight.sum(1) + TINY)
    best = jnp.where(there.sum(1) > 1, best, 0.0)
    best = jnp.repeat(best, group_size, axis=0)
    return jnp.where(mask, jnp.take_along_axis(best, jnp.minimum(number, length - 1), axis=1), 0.0)
