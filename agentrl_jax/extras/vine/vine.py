"""Vine: compares a turn with continuations from the same state, without a critic.

  A[b, k] = r_k + V'[k + 1] - V[k]
V[k] is the mean return of M continuations from the start of turn k (arXiv:2410.01679 uses the steps
of one answer). V'[k + 1] is the same for the next turn, but includes the episode's return: it is an
unbiased sample there, but would bias the baseline. V[0] needs no continuations: the other group
members start in the same state. fork.turns selects the turns with continuations. Turns without are
compared like the first, with 0 after a stop: without forks this is turn_grpo.

fork.turns=unsure continues each episode from one turn after the first, the one with the largest
mean -log p of its sampled tokens (BPO, arXiv:2607.14171). The advantages above at that turn are
BPO's: each return minus the mean of its siblings. BPO uses the entropy before the first token of a
turn, excludes the last turn, and also trains later turns of siblings with the same advantage. Its
advantages of turns before the fork add up to 0 over the siblings. Here all other turns are compared
like the first. (From summaries and reimplementations of BPO.)
Bias of unsure: the sampled tokens decide whether there is a sibling baseline, so unlikely turns are
compared with siblings more often. It is .06 to .44 of the gradient in environments of four or five
turns (benchmarks/turn_credit.md). 'ahead' draws the turn before it is played and has no bias.

The episode's turn and the first turns of its M continuations are a step group that shares one
state. With train='weighted' all 1 + M train with weight 1 / (1 + M) each. Without these weights
late turns, which have more samples, would count more than early ones, which is a bias. With
'trunks' only episodes train. Later turns of continuations only contribute to returns.

Vine has no stopping bias and the lowest variance of an update in environments of more than two
turns (benchmarks/turn_credit.md). Episodes of K turns take 1 + M (K - 1) / 2 times the turns, and
turn_grpo has less variance there per sampled turn.

scale: as in turn_grpo. token_mean also divides by one number; dividing by the length of a sequence
(seq_mean_token_mean) would undo the weights. An episode and its continuations are one sequence.
"""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp

from agentrl_jax.algorithms.turn_grpo import TurnGRPO
from agentrl_jax.extras.vine.credit import vine_advantages
from agentrl_jax.extras.vine.draw import fork_turns, forks_of_each
from agentrl_jax.extras.vine.forks import CONTINUATIONS, with_continuations
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL_IN_LOSS, build_batch, chosen, trained
from agentrl_jax.run.rules import ON_DEVICE
from agentrl_jax.settings.marks import ONE, ConfigName, In
from agentrl_jax.settings.rules import Rule, must


def known_turns(turns: str, max_turns: int) -> bool:
    try:
        return max_turns < 2 or isinstance(fork_turns(turns, max_turns), tuple)
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class Vine(TurnGRPO):
    turns: Annotated[str, ConfigName('fork.turns')] = (
        'every'  # turns with continuations: every, ahead (one
    )
    # per episode, drawn before it is played), unsure (one per episode, with the least likely
    # tokens), or numbers such as 1,2; the first turn is 0
    forks: Annotated[int, ONE, ConfigName('fork.continuations')] = (
        2  # continuations from each of these
    )
    # turns that an episode reaches
    train: Annotated[Literal['weighted', 'trunks'], ConfigName('fork.train')] = (
        'weighted'  # weighted: the
    )
    # first turns of continuations train too, with weight 1 / (1 + continuations) each; trunks: only
    # episodes train

    RULES = (
        Rule({'env.max_turns': In(low=2)}, 'continuations start at later turns'),
        must(
            'fork.turns',
            'every, ahead, unsure, or different turns from 1 to env.max_turns - 1, such as 1,2',
            lambda run: known_turns(run.algorithm.turns, run.env.max_turns),
        ),
        Rule(KL_IN_LOSS, 'returns of continuations are compared'),
        Rule(ON_DEVICE, 'episodes are continued from their later turns'),
        Rule({'reward.function': ''}, 'rewards of full episodes do not belong to turns'),
        must(
            'loss.aggregation',
            'token_mean, which keeps the weights of continuations',
            lambda run: run.algorithm.weights.aggregation != 'seq_mean_token_mean',
            unless={'fork.train': 'trunks'},
        ),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """Return a batch with one advantage per turn.

        With train='weighted' scores and batch have the rows of with_continuations.
        """
        if CONTINUATIONS not in rollout.extra:  # all turns are compared like the first
            return super().make_batch(
                rollout, scores, group_size=group_size, keep=keep, kl_coef=kl_coef
            )
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
        if self.train == 'trunks':
            advantages = adv.to_tokens(trunk_advantages, rollout.turn, mask)
        else:
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
        return forks_of_each(self.turns, max_turns, self.forks)

    def rows(self, rollout):
        return with_continuations(rollout) if self.train == 'weighted' else rollout

    def rows_per_episode(self, max_turns: int) -> int:
        return 1 + (self.continuations(max_turns) if self.train == 'weighted' else 0)

    def batch_metrics(self, batch, rows_per_episode):
        if self.train == 'trunks':
            return {}
        continued = batch.mask.any(1).reshape(-1, rows_per_episode)[:, 1:]
        return {'fork/trained_rows': continued.sum().astype(jnp.float32)}
