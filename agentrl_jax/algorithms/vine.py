"""Vine: a turn against others that were played from the very same start, without a critic.

  A[b, k] = r_k + V'[k + 1] - V[k]
V[k] is the mean of what M continuations earned from the start of turn k (arXiv:2410.01679 for the
steps of one answer); V'[k + 1] the same of the next turn with the episode's own return among them,
which is a fair sample there and would bias the baseline. V[0] needs none: the other members of the
group began in the same state. fork.turns says from which turns there are continuations; a turn
without any is compared as the first is, a stop counting as 0: without forks it is turn_grpo.

A turn's start, the episode's turn and the first turns of its M continuations are a step group that
really shares its state. With train='weighted' all 1 + M of them train, at 1 / (1 + M) each: without
these weights late turns, of which more are played, would count more than early ones, a bias. With
'trunks' only episodes train. What continuations play behind their first turn is return only.

It has no stopping bias and the least variance of an update in worlds of more than two turns
(benchmarks/turn_credit.md). Episodes of K turns take 1 + M (K - 1) / 2 times the turns, and for
each sampled turn turn_grpo has less variance there.

scale: as in turn_grpo. token_mean divides by one number too; a division by a sequence's own length
(seq_mean_token_mean) would undo the weights. An episode and its continuations are one sequence.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import common, turn_grpo
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective, turn_credit
from agentrl_jax.types import Batch, Rollout, Scores

USES_CRITIC = False
SETTINGS = ('scale', 'train')
DEFAULTS = common.DEFAULTS | {
    'turn_credit.scale': 'rms',
    'fork.turns': 'every',
    'fork.continuations': 2,
    'fork.train': 'weighted',
}
TRAIN = ('weighted', 'trunks')
loss = objective.clipped_loss
clipped = objective.clipped_tokens


def make_batch(
    rollout: Rollout,
    scores: Scores,
    *,
    group_size: int,
    keep: jax.Array | None = None,
    kl_coef: jax.Array | float = 0.0,
    kl_in_reward: bool = False,
    scale: str = 'rms',
    train: str = 'weighted',
) -> Batch:
    """One advantage per turn; keep bool [B] marks the rows a filter kept.

    With train='weighted' scores and batch have the rows of rollout.with_continuations.
    """
    if rollout.continuations is None:  # every turn is compared as the first is
        kl = dict(kl_coef=kl_coef, kl_in_reward=kl_in_reward)
        return turn_grpo.make_batch(
            rollout, scores, group_size=group_size, keep=keep, scale=scale, **kl
        )
    if kl_in_reward:
        raise ValueError('vine has no KL in the reward: set loss.kl_in=loss')
    if train not in TRAIN:
        raise ValueError(f'train={train!r} is not one of {", ".join(TRAIN)}')
    rows, mask = common.trained(rollout, keep)
    forks, turn = rollout.continuations.rollout, rollout.continuations.turn
    usable = (turn > 0) & forks.healthy & rows[:, None]
    own, forked, count = turn_credit.against_continuations(
        rollout.rewards + rollout.penalties,
        rollout.num_turns,
        rows,
        turn,
        forks.returns,
        usable,
        group_size=group_size,
    )
    if train == 'trunks':
        advantages = adv.to_tokens(own, rollout.turn, mask)
    else:
        weight = 1.0 / (1 + count)
        advantages = adv.to_tokens(own * weight, rollout.turn, mask)
        first = forks.action_mask & usable[:, :, None] & (forks.turn == turn[:, :, None])
        forked = forked * jnp.take_along_axis(weight, turn, axis=1)
        tokens = jnp.where(first, forked[:, :, None], 0.0)
        rollout = rollout.with_continuations
        mask, advantages = (
            jnp.concatenate([trunk[:, None], continued], axis=1).reshape(rollout.tokens.shape)
            for trunk, continued in ((mask, first), (advantages, tokens))
        )
    advantages = turn_grpo.scaled(advantages, mask, scale)
    return common.build_batch(rollout, scores, mask, advantages)
