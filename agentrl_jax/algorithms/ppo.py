"""PPO with a critic: StarPO and, with group filtering and clip-higher, StarPO-S (arXiv:2504.20073).

  A = GAE over action tokens of the turn rewards (environment reward + format penalty), whitened
  over the trained tokens of the batch;  critic target = A before whitening + V.
`estimator` chooses the recursion: 'token' (observations are stepped over), 'turn' (turn ends only,
one advantage per turn), 'bi_level' (turns with turn_gamma, then tokens inside a turn).
RAGEN: gamma = lam = 1, reward_on 'episode'. MT-PPO (arXiv:2505.11821 v2): reward_on 'turn'.
An episode that its budget of turns or tokens cuts is over, as in RAGEN and AgentGym-RL: what it
would still have earned counts as 0. With bootstrap_truncated the critic's value of the state behind
its last token stands for that (arXiv:1712.00378); the critic learns such values where episodes go
on, from the return of the next turn. A budget of actions is part of the task: it is in the prompt.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective
from agentrl_jax.types import Batch, EpisodeStop, Rollout, Scores

USES_CRITIC = True
SETTINGS = (
    'gamma',
    'lam',
    'reward_on',
    'whiten',
    'reward_normalization',
    'estimator',
    'turn_gamma',
    'bootstrap_truncated',
)
DEFAULTS = common.DEFAULTS | {
    'loss.entropy_coef': 0.001,
    'loss.kl_in': 'reward',
    'loss.gamma': 1.0,
    'loss.lam': 1.0,
    'loss.reward_on': 'turn',
    'loss.whiten': True,
    'loss.reward_normalization': 'identity',
    'loss.estimator': 'token',
    'turn_credit.turn_gamma': 1.0,
    'loss.bootstrap_truncated': False,
}
ESTIMATORS = ('token', 'turn', 'bi_level')
loss = objective.clipped_loss
clipped = objective.clipped_tokens


def token_rewards(
    rollout: Rollout,
    rows: jax.Array,
    mask: jax.Array,
    *,
    reward_on: str,
    normalization: str,
    group_size: int,
) -> jax.Array:
    """common.token_rewards, with RAGEN's normalisations of the return where it is placed whole."""
    if normalization == 'identity':
        return common.token_rewards(rollout, mask, reward_on=reward_on)
    if reward_on != 'episode':
        raise ValueError(
            f'reward normalisation {normalization!r} is of episode returns: it needs '
            "reward_on='episode'"
        )
    returns = adv.normalize_returns(
        rollout.returns, rows, method=normalization, group_size=group_size
    )
    return adv.place_on_episode_end(returns, mask)


def cut_values(rollout: Rollout, scores: Scores, mask: jax.Array) -> jax.Array:
    """The value behind the last token of episodes that a budget of turns or tokens cut; [B, T]."""
    stop = rollout.episode_stop[:, None]
    cut = (stop == EpisodeStop.TURN_BUDGET) | (stop == EpisodeStop.TOKEN_BUDGET)
    return jnp.where(adv.episode_ends(mask) & cut, scores.next_values, 0.0)


def with_turn_starts(batch: Batch, scores: Scores) -> Batch:
    """The batch in which the critic learns the value behind each turn that another one follows.

    Its target is that of the next token whose value is trained: nothing is earned in between.
    """
    on = adv.turn_ends(batch.mask, batch.turn) & ~adv.episode_ends(batch.mask)
    behind, targets, old = (
        jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
        for x in (on, adv.next_masked(batch.returns, batch.value_mask), scores.next_values)
    )
    return batch.replace(
        value_mask=batch.value_mask | behind,
        returns=jnp.where(behind, targets, batch.returns),
        old_values=jnp.where(behind, old, batch.old_values),
    )


def make_batch(
    rollout: Rollout,
    scores: Scores,
    *,
    group_size: int,
    keep: jax.Array | None = None,
    kl_coef: jax.Array | float = 0.0,
    kl_in_reward: bool = False,
    gamma: float = 1.0,
    lam: float = 1.0,
    reward_on: str = 'turn',
    whiten: bool = True,
    reward_normalization: str = 'identity',
    estimator: str = 'token',
    turn_gamma: float = 1.0,
    bootstrap_truncated: bool = False,
) -> Batch:
    """Advantages and critic targets of a rollout; keep bool [B] marks the rows a filter kept."""
    rows, mask = common.trained(rollout, keep)
    rewards = token_rewards(
        rollout,
        rows,
        mask,
        reward_on=reward_on,
        normalization=reward_normalization,
        group_size=group_size,
    ) - common.token_kl(scores, mask, kl_coef, kl_in_reward)
    turn, value_mask = rollout.turn, mask
    if bootstrap_truncated:
        discount = gamma if estimator == 'token' else turn_gamma
        rewards = rewards + discount * cut_values(rollout, scores, mask)
    if estimator == 'token':
        advantages = adv.gae(rewards, scores.values, mask, gamma=gamma, lam=lam)
    elif estimator == 'turn':
        value_mask = adv.turn_ends(mask, turn)
        advantages = adv.turn_wise_gae(
            rewards, scores.values, mask, turn, turn_gamma=turn_gamma, lam=lam
        )
    elif estimator == 'bi_level':
        advantages = adv.bi_level_gae(
            rewards, scores.values, mask, turn, gamma=gamma, turn_gamma=turn_gamma, lam=lam
        )
    else:
        raise ValueError(f'estimator={estimator!r} must be token, turn or bi_level')
    returns = advantages + scores.values
    if whiten:
        advantages = adv.whiten(advantages, mask, over=value_mask)
    batch = common.build_batch(
        rollout, scores, mask, advantages, returns=returns, value_mask=value_mask
    )
    return with_turn_starts(batch, scores) if bootstrap_truncated else batch
