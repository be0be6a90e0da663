"""CISPO: the importance weight is clipped, never the gradient of a token (arXiv:2506.13585).

  loss_t = -sg(w) A log pi,  w = clip(rho, 1 - clip_low, 1 + clip_high),  A as in GRPO
The lower side is open: clip_low = 1. The paper names no upper bound; a weight of at most 5 is that
of arXiv:2510.13786. dual_clip does not apply.

loss.center_scores takes off the mean of the weighted score w grad log pi over what could have been
sampled (score centering, arXiv:2609.20807; the abstract and public code of it were read):
  loss_t = -A [sg(w) log pi(y_t) - sum_v sg(q_v w_v) log pi(v)],  q = pi_old(. | s_t)
With w = rho that mean is 0, and so it is at the first optimiser step on a rollout, where pi is q:
what is left of a bounded weight later on is a drift of the policy that no advantage asks for. The
sum is exact, over the vocabulary or the allowed tokens; others have 128 tokens of the sampler and a
bound for the rest. Each forward pass of the policy costs another one of that before the update.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import losses
from agentrl_jax.rl.algorithm import Comparison, Exploring, Range
from agentrl_jax.settings.marks import At
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class CISPO(Exploring):
    clip: Range = Range(1.0, 4.0)
    comparison: Comparison = Comparison()
    centered: Annotated[bool, At('loss.center_scores')] = False  # the mean weighted score over all
    # tokens is taken off each token's (score centering)

    make_batch, returns = GRPO.make_batch, GRPO.returns

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        bounded = jnp.clip(ratio, 1.0 - self.clip.low, 1.0 + self.clip.high)
        weight = jax.lax.stop_gradient(bounded)
        current = jnp.where(batch.mask, logprobs, 0.0)
        return -weight * jnp.where(batch.mask, batch.advantages, 0.0) * current

    @property
    def score_bounds(self) -> tuple[float, float] | None:
        return (1.0 - self.clip.low, 1.0 + self.clip.high) if self.centered else None

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        yield from super().conflicts(run, shards)
        if not self.centered:
            return
        rows = self.filter.kept(run.rollout.num_groups) * run.rollout.group_size
        if run.batch.epochs == 1 and rows <= run.batch.minibatch_rows:
            yield (
                'loss.center_scores=True has no effect on the only optimiser step of a rollout, '
                'where the mean score is 0: set batch.epochs to 2 or more, or a smaller '
                'batch.minibatch_rows'
            )
        if run.sampler.corrects:
            yield (
                'loss.center_scores=True takes off the mean of scores by the ratio to the policy '
                'before the update: set loss.sampler_correction and loss.sampler_reject to off'
            )
        if run.rollout.staleness:
            yield (
                'loss.center_scores=True takes off the mean of scores under the policy before the '
                f'update, and rollout.staleness={run.rollout.staleness} lets older ones play: set '
                'it to 0'
            )

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Tokens whose weight is bounded, whatever the sign of their advantage; bool [B, T]."""
        ratio = jnp.exp(losses.log_ratio(logprobs, batch.old_logprobs, batch.mask))
        return {
            'policy/clip_frac_high': ratio > 1.0 + self.clip.high,
            'policy/clip_frac_low': ratio < 1.0 - self.clip.low,
        }
