"""Vine: compares a turn with continuations from the same state, without a critic.

  A[b, k] = r_k + V'[k + 1] - V[k]
V[k] is the mean return of M continuations from the start of turn k (arXiv:2410.01679 uses the steps
of one answer). V'[k + 1] is the same for the next turn, but includes the episode's return: it is an
unbiased sample there, but would bias the baseline. V[0] needs no continuations: the other group
members start in the same state. A turn without continuations is compared in the same way, with 0
after a stop: without forks this is turn_grpo.

The episode's turn and the first turns of its M continuations are a step group that shares one
state. All 1 + M train with weight 1 / (1 + M) each. Without these weights late turns, which have
more samples, would count more than early ones, which is a bias. Later turns of continuations only
contribute to returns.

Vine has no stopping bias and the lowest variance of an update in environments of more than two
turns (benchmarks/turn_credit.md). Episodes of K turns take 1 + M (K - 1) / 2 times the turns, and
turn_grpo has less variance there per sampled turn.

scale: as in turn_grpo. token_mean also divides by one number; dividing by the length of a sequence
(seq_mean_token_mean) would undo the weights. An episode and its continuations are one sequence.
"""

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from agentrl_jax.algorithms.turn_grpo import TurnGRPO
from agentrl_jax.extras.vine.credit import vine_advantages
from agentrl_jax.extras.vine.forks import CONTINUATIONS, with_continuations
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL_IN_LOSS, build_batch, chosen, trained
from agentrl_jax.run.rules import ON_DEVICE
from agentrl_jax.settings.marks import ONE, ConfigName, In
from agentrl_jax.settings.rules import Rule, must


@dataclasses.dataclass(frozen=True)
class Vine(TurnGRPO):
    forks: Annotated[int, ONE, ConfigName('fork.continuations')] = 2  # continuations from the start
    # of each turn after the first that an episode reaches

    RULES = (
        Rule({'env.max_turns': In(low=2)}, 'continuations start at later turns'),
        Rule(KL_IN_LOSS, 'returns of continuations are compared'),
        Rule(ON_DEVICE, 'episodes are continued from their later turns'),
        Rule({'reward.function': ''}, 'rewards of full episodes do not belong to turns'),
        must(
            'loss.aggregation',
            'token_mean, which keeps the weights of continuations',
            lambda run: run.algorithm.weights.aggregation != 'seq_mean_token_mean',
        ),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per turn.

        If the rollout has continuations, scores and batch have the rows of with_continuations.
        """
        if CONTINUATIONS not in rollout.extra:  # all turns are compared like the first
            return super().make_batch(rollout, scores, group_size=group_size, keep=keep)
        rows, mask = trained(rollout, keep)
        continuations = rollout.extra[CONTINUATIONS]
        forks, turn = continuations.rollout, continuations.turn
        usable = (turn > 0) & forks.healthy & rows[:, None]
        trunk_advantages, forked, count = vine_advantages(
            rollout.turn_returns,
            rollout.num_turns,
            rows,
            turn,
            forks.returns,
            usable,
            group_size=group_size,
            scales=(rollout.magnitudes.turn_returns, forks.magnitudes.returns),
        )
        weight = 1.0 / (1 + count)
        advantages = adv.to_tokens(trunk_advantages * weight, rollout.turn, mask)
        first = chosen(forks) & usable[:, :, None] & (forks.turn == turn[:, :, None])
        forked = forked * jnp.take_along_axis(weight, turn, axis=1)
        tokens = jnp.where(first, forked[:, :, None], 0.0)
        rollout = with_continuations(rollout)
        mask, advantages = (
            jnp.concatenate([trunk[:, None], continued], axis=1).reshape(rollout.tokens.shape)
            for trunk, continued in ((mask, first), (advantages, tokens))
        )
        return build_batch(rollout, scores, mask, self.scaled(advantages, mask))

    def continuations(self, max_turns: int) -> int:
        return self.forks * (max_turns - 1)

    def rows(self, rollout):
        return with_continuations(rollout)

    def batch_metrics(self, batch, rows_per_episode):
        continued = batch.mask.any(1).reshape(-1, rows_per_episode)[:, 1:]
        return {'fork/trained_rows': continued.sum().astype(jnp.float32)}
