"""Vine: a turn against others that were played from the very same start, without a critic.

  A[b, k] = r_k + V'[k + 1] - V[k]
V[k] is the mean of what M continuations earned from the start of turn k (arXiv:2410.01679 for the
steps of one answer); V'[k + 1] the same of the next turn with the episode's own return among them,
which is a fair sample there and would bias the baseline. V[0] needs none: the other members of the
group began in the same state. fork.turns says from which turns there are continuations; a turn
without any is compared as the first is, a stop counting as 0: without forks it is turn_grpo.

fork.turns=unsure plays on where the policy was least sure (BPO, arXiv:2607.14171): of each episode
from the later turn whose sampled tokens surprised it most, by their mean -log p. At that turn the
advantages above are BPO's, each return less the mean of its siblings'. BPO takes the entropy before
the first token of a turn, leaves out the last turn, and trains what siblings say later as well, at
that same advantage; what it gives to the turns before the fork adds up to 0 over the siblings. Here
all other turns are compared as the first is. Read in summaries and reimplementations of it.
Bias: what is sampled decides whether there is a baseline of siblings, so a turn is compared more
often with them the less likely what it said was: .06 to .44 of the gradient in worlds of four or
five turns (benchmarks/turn_credit.md). 'ahead' draws the turn before it is played and has none.

A turn's start, the episode's turn and the first turns of its M continuations are a step group that
really shares its state. With train='weighted' all 1 + M of them train, at 1 / (1 + M) each: without
these weights late turns, of which more are played, would count more than early ones, a bias. With
'trunks' only episodes train. What continuations play after their first turn is return only.

It has no stopping bias and the least variance of an update in worlds of more than two turns
(benchmarks/turn_credit.md). Episodes of K turns take 1 + M (K - 1) / 2 times the turns, and for
each sampled turn turn_grpo has less variance there.

scale: as in turn_grpo. token_mean divides by one number too; a division by a sequence's own length
(seq_mean_token_mean) would undo the weights. An episode and its continuations are one sequence.
"""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp

from agentrl_jax.algorithms.turn_grpo import TurnGRPO
from agentrl_jax.extras.vine.credit import against_continuations
from agentrl_jax.extras.vine.draw import fork_turns, forks_of_each
from agentrl_jax.extras.vine.forks import CONTINUATIONS, with_continuations
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL_IN_LOSS, build_batch, chosen, trained
from agentrl_jax.run.rules import ON_DEVICE
from agentrl_jax.settings.marks import ONE, At, In
from agentrl_jax.settings.rules import Rule, must


def known_turns(turns: str, max_turns: int) -> bool:
    try:
        return max_turns < 2 or isinstance(fork_turns(turns, max_turns), tuple)
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class Vine(TurnGRPO):
    turns: Annotated[str, At('fork.turns')] = 'every'  # from whose starts: every, ahead (one, drawn
    # for each episode before it is played), unsure (one, where its tokens were the least likely),
    # or numbers such as 1,2; the first turn is 0
    forks: Annotated[int, ONE, At('fork.continuations')] = 2  # from each of these turns that is
    # reached
    train: Annotated[Literal['weighted', 'trunks'], At('fork.train')] = 'weighted'  # weighted: the
    # first turn of a continuation trains too, at 1 / (1 + continuations) each; trunks: only
    # episodes train

    RULES = (
        Rule({'env.max_turns': In(low=2)}, 'continuations begin at later turns'),
        must(
            'fork.turns',
            'every, ahead, unsure, or different turns from 1 to env.max_turns less 1, such as 1,2',
            lambda run: known_turns(run.algorithm.turns, run.env.max_turns),
        ),
        Rule(KL_IN_LOSS, 'returns of continuations are compared'),
        Rule(ON_DEVICE, 'episodes are played again from later turns'),
        Rule({'reward.function': ''}, 'rewards of whole episodes have no later turns'),
        must(
            'loss.aggregation',
            'token_mean, which keeps the weights of continuations',
            lambda run: run.algorithm.weights.aggregation != 'seq_mean_token_mean',
            unless={'fork.train': 'trunks'},
        ),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per turn.

        With train='weighted' scores and batch have the rows of with_continuations.
        """
        if CONTINUATIONS not in rollout.extra:  # every turn is compared as the first is
            return super().make_batch(
                rollout, scores, group_size=group_size, keep=keep, kl_coef=kl_coef
            )
        rows, mask = trained(rollout, keep)
        continuations = rollout.extra[CONTINUATIONS]
        forks, turn = continuations.rollout, continuations.turn
        usable = (turn > 0) & forks.healthy & rows[:, None]
        own, forked, count = against_continuations(
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
            advantages = adv.to_tokens(own, rollout.turn, mask)
        else:
            weight = 1.0 / (1 + count)
            advantages = adv.to_tokens(own * weight, rollout.turn, mask)
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
