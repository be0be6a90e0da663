"""SAPO: a smooth gate in the place of the clip (arXiv:2511.20347).

  loss_t = -A (4 / tau) sigmoid(tau (rho - 1)),  tau = tau_pos where A > 0, else tau_neg
rho = pi / pi_old of the token, A as in GRPO. The gate's slope at rho = 1 is 1, as that of rho; away
from it tokens fade rather than drop out, those of negative advantages sooner (tau_neg > tau_pos).
Nothing is clipped, so no fraction of clipped tokens is measured.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import Comparison, Exploring, Weights
from agentrl_jax.settings.marks import POSITIVE
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class Gates:
    """How fast tokens fade."""

    AT = 'loss.tau_'
    pos: Annotated[float, POSITIVE] = 1.0  # steepness of the gate of positive advantages
    neg: Annotated[float, POSITIVE] = 1.05  # ... of negative ones


@dataclasses.dataclass(frozen=True)
class SAPO(Exploring):
    tau: Gates = Gates()
    weights: Weights = Weights('seq_mean_token_mean')
    comparison: Comparison = Comparison()

    make_batch, returns = GRPO.make_batch, GRPO.returns

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        advantages = jnp.where(batch.mask, batch.advantages, 0.0)
        tau = jnp.where(advantages > 0, self.tau.pos, self.tau.neg)
        return -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))
