"""DPPO: drops tokens with too large a change of probability from the loss (arXiv:2602.04879).

  loss_t = -A sg(min(rho, bound)) log pi, and 0 where A > 0 and pi - pi_old > tv_high,
                                              or where A <= 0 and pi_old - pi > tv_low
rho = pi / pi_old of the token, A as in GRPO. The difference of probabilities is the total variation
of 'this token or another one' (the paper's Binary-TV). A ratio does not measure it: rare tokens
have large ratios for negligible differences, frequent tokens have small ratios for large ones. The
bound of the weight is verl's (clip_ratio_c, 20); the paper's delta is .2.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import Algorithm, Comparison
from agentrl_jax.settings.marks import ONE, POSITIVE_FRACTION
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class Trust:
    """Maximum change of the probability of a sampled token."""

    AT = 'loss.tv_'
    low: Annotated[float, POSITIVE_FRACTION] = 0.2
    # maximum decrease, for advantages that are not positive
    high: Annotated[float, POSITIVE_FRACTION] = 0.2  # maximum increase, for positive advantages
    bound: Annotated[float, ONE] = 20.0  # maximum weight of a token


@dataclasses.dataclass(frozen=True)
class DPPO(Algorithm):
    tv: Trust = Trust()
    comparison: Comparison = Comparison()

    make_batch, returns = GRPO.make_batch, GRPO.returns

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, self.tv.bound))
        left = batch.mask & ~self._dropped(logprobs, batch)
        current = jnp.where(left, logprobs, 0.0)
        return -weight * jnp.where(left, batch.advantages, 0.0) * current

    def _dropped(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        moved = self._moved(logprobs, batch)
        rises = batch.advantages > 0
        return jnp.where(rises, moved > self.tv.high, moved < -self.tv.low)

    def _moved(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """Return pi - pi_old of the sampled tokens, 0 off the mask; [B, T]."""
        now, before = (jnp.where(batch.mask, x, 0.0) for x in (logprobs, batch.old_logprobs))
        return jax.lax.stop_gradient(jnp.exp(now) - jnp.exp(before))

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Return the tokens dropped from the loss; bool [B, T]."""
        dropped, rises = self._dropped(logprobs, batch), batch.advantages > 0
        return {'policy/clip_frac_high': dropped & rises, 'policy/clip_frac_low': dropped & ~rises}
