"""PPO with a critic: StarPO and, with group filtering and clip-higher, StarPO-S (arXiv:2504.20073).

  A = GAE over action tokens of the turn rewards (environment reward + format penalty), whitened
  over the trained tokens of the batch;  critic target = A before whitening + V.
`estimator` selects the recursion: 'token' (skips observations), 'turn' (turn ends only, one
advantage per turn), 'bi_level' (turns with turn_gamma, then tokens inside a turn).
RAGEN: gamma = lam = 1, reward_on 'episode'. MT-PPO (arXiv:2505.11821 v2): reward_on 'turn'.
The return after a cut by the turn or token budget counts as 0, as in RAGEN and AgentGym-RL. With
bootstrap_truncated it is the critic's value after the last token (arXiv:1712.00378). The critic
learns these values from the return of the next turn, in episodes that continue. A cut by the action
budget is never bootstrapped: that budget is part of the task and stated in the prompt.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl.algorithm import KL, ClippedSurrogate, build_batch, trained
from agentrl_jax.rl.recursions import (
    bi_level_gae,
    episode_ends,
    gae,
    place_on_episode_end,
    token_rewards,
    turn_wise_gae,
    whiten,
)
from agentrl_jax.settings.marks import SHARE, ConfigName, In, NameIn, Neutral, OnlyIf
from agentrl_jax.settings.rules import Rule
from agentrl_jax.types import Batch, EpisodeStop, Rollout, Scores

# loss.reward_normalization -> norm of advantages.compare
NORMALIZATIONS = {'identity': 'none', 'mean': 'mean', 'mean_std': 'std', 'asym_clip': 'asym_clip'}
BY_TOKENS = OnlyIf(lambda ppo: ppo.estimator != 'turn', 'loss.estimator=token or bi_level')
BY_TURNS = OnlyIf(lambda ppo: ppo.estimator != 'token', 'loss.estimator=turn or bi_level')
EPISODE_REWARD = OnlyIf(lambda ppo: ppo.reward_on == 'episode', 'loss.reward_on=episode')


@dataclasses.dataclass(frozen=True)
class PPO(ClippedSurrogate):
    entropy_coef: float = 0.001
    kl: KL = KL(where='reward')
    gamma: Annotated[float, SHARE, Neutral(1.0), BY_TOKENS] = 1.0  # discount per action token
    lam: Annotated[float, SHARE, Neutral(1.0)] = 1.0  # lambda of GAE, per action token
    reward_on: Annotated[Literal['turn', 'episode'], Neutral('turn')] = 'turn'
    # turn: each reward at the end of its turn; episode: the return at the last token
    whiten: bool = True  # normalise advantages to mean 0, variance 1 over action tokens
    reward_normalization: Annotated[
        str, NameIn(NORMALIZATIONS), Neutral('identity'), EPISODE_REWARD
    ] = 'identity'  # normalisation of the returns of a group: identity, mean, mean_std or asym_clip
    estimator: Literal['token', 'turn', 'bi_level'] = 'token'  # recursion of GAE: token (skips
    # observations), turn (turn ends only, one advantage per turn), bi_level (turns with turn_gamma,
    # then tokens inside a turn)
    turn_gamma: Annotated[float, SHARE, ConfigName('turn_credit.turn_gamma'), BY_TURNS] = 1.0
    # discount per turn
    bootstrap_truncated: Annotated[bool, Neutral(False)] = False  # after a cut by the turn or token
    # budget, bootstrap with the critic's value; False: with 0

    RULES = (
        Rule(
            {'loss.bootstrap_truncated': False, 'loss.reward_on': 'turn'},
            'rewards would count twice',
        ),
        Rule({'loss.reward_normalization': 'identity', 'rollout.group_size': In(low=2)}),
    )
    USES_CRITIC = True
    COMPARES_GROUPS = False

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with advantages and critic targets."""
        rows, mask = trained(rollout, keep)
        rewards, scale = self.token_rewards(rollout, rows, mask, group_size)
        kl, kl_scale = self.token_kl(scores, mask)
        rewards = rewards - kl
        turn, value_mask = rollout.turn, mask
        if self.bootstrap_truncated:
            discount = self.gamma if self.estimator == 'token' else self.turn_gamma
            rewards = rewards + discount * cut_values(rollout, scores, mask)
        if self.estimator == 'token':
            advantages = gae(rewards, scores.values, mask, gamma=self.gamma, lam=self.lam)
        elif self.estimator == 'turn':
            value_mask = adv.turn_ends(mask, turn)
            advantages = turn_wise_gae(
                rewards, scores.values, mask, turn, turn_gamma=self.turn_gamma, lam=self.lam
            )
        else:
            advantages = bi_level_gae(
                rewards,
                scores.values,
                mask,
                turn,
                gamma=self.gamma,
                turn_gamma=self.turn_gamma,
                lam=self.lam,
            )
        returns = advantages + scores.values
        if self.whiten:
            scale = (scale + kl_scale.sum(1))[:, None] + jnp.abs(scores.values)
            advantages = whiten(advantages, mask, over=value_mask, scale=scale)
        batch = build_batch(
            rollout, scores, mask, advantages, returns=returns, value_mask=value_mask
        )
        return with_turn_starts(batch, scores) if self.bootstrap_truncated else batch

    def token_rewards(
        self, rollout: Rollout, rows: jax.Array, mask: jax.Array, group_size: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return (token_rewards [B, T], the rounding scale of their sums [B]).

        RAGEN's normalisations apply to returns on the last token only.
        """
        scale = rollout.magnitudes.returns
        if self.reward_normalization == 'identity':
            return token_rewards(rollout, mask, reward_on=self.reward_on), scale
        norm = NORMALIZATIONS[self.reward_normalization]
        returns = adv.compare(rollout.returns, rows, group_size=group_size, norm=norm, scale=scale)
        return place_on_episode_end(returns, mask), jnp.abs(returns)


def cut_values(rollout: Rollout, scores: Scores, mask: jax.Array) -> jax.Array:
    """Return the value after the last token of episodes cut by a turn or token budget; [B, T]."""
    stop = rollout.episode_stop[:, None]
    cut = (stop == EpisodeStop.TURN_BUDGET) | (stop == EpisodeStop.TOKEN_BUDGET)
    return jnp.where(episode_ends(mask) & cut, scores.next_values, 0.0)


def with_turn_starts(batch: Batch, scores: Scores) -> Batch:
    """Train the critic on the value after each turn except the last.

    Its target is the target of the next token with a trained value: no reward is in between.
    """
    on = adv.turn_ends(batch.mask, batch.turn) & ~episode_ends(batch.mask)
    after, targets, old = (
        jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
        for x in (on, adv.next_masked(batch.returns, batch.value_mask), scores.next_values)
    )
    return batch.replace(
        value_mask=batch.value_mask | after,
        returns=jnp.where(after, targets, batch.returns),
        old_values=jnp.where(after, old, batch.old_values),
    )
