"""SAPO: a smooth gate instead of the clip (arXiv:2511.20347).

  loss_t = -A (4 / tau) sigmoid(tau (rho - 1)),  tau = tau_pos where A > 0, else tau_neg
rho = pi / pi_old of the token, A as in GRPO. The gate has slope 1 at rho = 1, like rho. Further
away, tokens fade instead of dropping out, faster for negative advantages (tau_neg > tau_pos).
Nothing is clipped, so there are no clip fractions.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import Algorithm, Comparison, Weights
from agentrl_jax.settings.marks import POSITIVE
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class Gates:
    """Steepness of the gates."""

    AT = 'loss.tau_'
    pos: Annotated[float, POSITIVE] = 1.0  # steepness of the gate for positive advantages
    neg: Annotated[float, POSITIVE] = 1.05  # steepness of the gate for negative advantages


@dataclasses.dataclass(frozen=True)
class SAPO(Algorithm):
    tau: Gates = Gates()
    weights: Weights = Weights('seq_mean_token_mean')
    comparison: Comparison = Comparison()

    make_batch, returns = GRPO.make_batch, GRPO.returns

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        advantages = jnp.where(batch.mask, batch.advantages, 0.0)
        tau = jnp.where(advantages > 0, self.tau.pos, self.tau.neg)
        return -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
