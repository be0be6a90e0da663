"""DAPO: GRPO with a soft penalty for long answers (arXiv:2503.14476).

  A as in GRPO, of R + min(0, (L_max - buffer - length) / buffer) overlong_coef
The other parts are settings: clip_high=0.28, aggregation='token_mean', no KL, and dynamic sampling
(the filter rule 'varied' drops groups with equal returns, and filter.refill plays other groups
instead). length is the number of sampled tokens of an episode. L_max defaults to the most that an
episode can sample, buffer to a fifth of that. max_length=0 disables the penalty.
"""

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL, Clip, Filter, Weights, max_sampled_tokens
from agentrl_jax.settings.marks import ZERO, DefaultFrom, Neutral, OnlyIf
from agentrl_jax.settings.rules import must

PENALISES = OnlyIf(lambda dapo: bool(dapo.max_length), 'loss.max_length')


@dataclasses.dataclass(frozen=True)
class DAPO(GRPO):
    clip: Clip = Clip(high=0.28)
    kl: KL = KL()
    weights: Weights = Weights('token_mean')
    filter: Filter = Filter('varied', refill=9)  # at most ten rollouts, as in the DAPO recipe
    max_length: Annotated[
        int | None,
        ZERO,
        Neutral(0),
        DefaultFrom(max_sampled_tokens, 'the most tokens that an episode can sample'),
    ] = None  # sampled tokens of an episode with the full penalty; 0 = no penalty
    overlong_buffer: Annotated[
        int | None,
        ZERO,
        PENALISES,
        DefaultFrom(
            lambda run: max_sampled_tokens(run) // 5, 'a fifth of the most that it can sample'
        ),
    ] = None  # length of the penalised range before max_length (paper: 4096 of 20480)
    overlong_coef: Annotated[float, ZERO, PENALISES] = 1.0  # penalty at max_length

    RULES = (
        must(
            'loss.overlong_buffer',
            'less than loss.max_length',
            lambda run: not 0 < run.algorithm.max_length <= (run.algorithm.overlong_buffer or 0),
        ),
    )

    def returns(self, rollout, scores, mask):
        """Return the episode returns minus the length penalty, and their rounding scale; [B]."""
        returns, scale = self.episode_returns(rollout, scores, mask)
        if not self.max_length:
            return returns, scale
        penalty = adv.overlong_penalty(
            rollout.action_mask.sum(1),
            max_length=self.max_length,
            buffer=self.overlong_buffer,
            coef=self.overlong_coef,
        )
        return returns + penalty, scale + jnp.abs(penalty)
