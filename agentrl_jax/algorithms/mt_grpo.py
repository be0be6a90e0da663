"""MT-GRPO: every turn has an advantage of its own, without a critic (arXiv:2505.11821 v1).

  A[b, t] = A[b, k] of the turn k of token t; turn_credit.turn_advantages lists the modes, default
  mt_cumulative: sum_{l >= k} norm_l(r_l) + norm(o). With two turns it is the paper's estimator.
Turn rewards r are environment rewards and format penalties. `outcome` says what o is:
  'answer'   the reward of a last turn that ended the world, which then leaves r, else 0 and r keeps
             it: the paper's R_T and R_O where episodes may run out of turns before they answer
  'final'    the reward of the episode's last turn, which then leaves r
  'success'  1 for a solved episode; r are all turn rewards, so a reward for solving counts twice
  'return'   the whole return; r are all turn rewards
The normaliser is (x - mean) / (std + 1e-4), as the paper's code has it. MT-PPO (v2) is ppo with
reward_on='turn'.

Bias: turn k is compared among the members that reached it, so where the policy may stop, what a
further turn earns or costs does not reach the decision to take it (two turns, the second worth +1
or -1 to those who take it: advantage 0 for going on in both). The other modes have other biases,
listed at turn_credit.turn_advantages and measured in benchmarks/turn_credit.md; turn_grpo has none.
That turn k >= 1 of independent episodes starts from different states costs variance, not bias.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import KL_IN_LOSS, Clipped, Comparison, build_batch, trained
from agentrl_jax.settings.marks import FINITE, SHARE, At, OneOf, When
from agentrl_jax.settings.rules import Rule, must
from agentrl_jax.types import EpisodeStop, Rollout

PER_TURN = {'turn_credit.mode': set(turn_credit.MODES) - {'or', 'mt_v1'}}
DISCOUNTS = When(lambda mt: mt.mode in ('gtpo', 'hybrid'), 'turn_credit.mode=gtpo or hybrid')


@dataclasses.dataclass(frozen=True)
class MTGRPO(Clipped):
    mode: Annotated[str, OneOf(turn_credit.MODES), At('turn_credit.mode')] = 'mt_cumulative'  # a
    # name in agentrl_jax.rl.turn_credit.MODES: or, mr, mt_v1, mt_cumulative, mt_local, gtpo,
    # hybrid, flattened
    outcome: Annotated[
        Literal['success', 'final', 'return', 'answer'], At('turn_credit.outcome')
    ] = 'answer'  # answer, final, success, return: see agentrl_jax/algorithms/mt_grpo.py
    turn_coef: Annotated[float, FINITE, At('turn_credit.turn_coef')] = 1.0  # weight of the turn
    # rewards
    outcome_coef: Annotated[float, FINITE, At('turn_credit.outcome_coef')] = 1.0  # weight of the
    # outcome
    turn_gamma: Annotated[float, SHARE, At('turn_credit.turn_gamma'), DISCOUNTS] = 0.9  # discount
    # per turn
    comparison: Comparison = Comparison(eps=1e-4)

    RULES = (
        Rule(KL_IN_LOSS | PER_TURN, 'a KL in the reward belongs to turns'),
        must(
            'turn_credit.turn_coef',
            'a number other than 0',
            lambda run: run.algorithm.turn_coef,
            unless=KL_IN_LOSS,
        ),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per turn."""
        rows, mask = trained(rollout, keep)
        rewards, outcomes = split_rewards(rollout, self.outcome)
        scale, outcome_scale = split_rewards(rollout.magnitudes, self.outcome)
        kl, kl_scale = self.turn_kl(rollout, scores, mask, kl_coef)
        per_turn = turn_credit.turn_advantages(
            rewards - kl,
            outcomes,
            rollout.num_turns,
            rows,
            group_size=group_size,
            mode=self.mode,
            turn_coef=self.turn_coef,
            outcome_coef=self.outcome_coef,
            gamma=self.turn_gamma,
            acts=rollout.acts,
            scale=scale + kl_scale,
            outcome_scale=outcome_scale,
            **dataclasses.asdict(self.comparison),
        )
        return build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))


def split_rewards(rollout: Rollout, outcome: str) -> tuple[jax.Array, jax.Array]:
    """(turn rewards [B, K], outcomes [B]) for one of the meanings of an outcome."""
    rewards = rollout.rewards + rollout.penalties
    if outcome == 'success':
        return rewards, rollout.success.astype(rewards.dtype)
    if outcome == 'return':
        return rewards, rewards.sum(1)
    last = jnp.arange(rewards.shape[1])[None] == rollout.num_turns[:, None] - 1
    if outcome == 'answer':
        last &= (rollout.episode_stop == EpisodeStop.TERMINATED)[:, None]
    return jnp.where(last, 0.0, rewards), jnp.where(last, rewards, 0.0).sum(1)
