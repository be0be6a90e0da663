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

import jax
import jax.numpy as jnp

from agentrl_jax.algorithms import common
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import objective, turn_credit
from agentrl_jax.types import Batch, EpisodeStop, Rollout, Scores

USES_CRITIC = False
SETTINGS = (
    'mode',
    'outcome',
    'turn_coef',
    'outcome_coef',
    'turn_gamma',
    'norm',
    'eps',
    'std_floor',
)
DEFAULTS = common.DEFAULTS | {
    'turn_credit.mode': 'mt_cumulative',
    'turn_credit.outcome': 'answer',
    'turn_credit.turn_coef': 1.0,
    'turn_credit.outcome_coef': 1.0,
    'turn_credit.turn_gamma': 0.9,
    'loss.norm': 'std',
    'loss.eps': 1e-4,
    'loss.std_floor': 0.0,
}
OUTCOMES = ('success', 'final', 'return', 'answer')
loss = objective.clipped_loss
clipped = objective.clipped_tokens


def split_rewards(rollout: Rollout, outcome: str) -> tuple[jax.Array, jax.Array]:
    """(turn rewards [B, K], outcomes [B]) for one of the meanings of an outcome."""
    rewards = rollout.rewards + rollout.penalties
    if outcome == 'success':
        return rewards, rollout.success.astype(rewards.dtype)
    if outcome == 'return':
        return rewards, rewards.sum(1)
    if outcome not in OUTCOMES:
        raise ValueError(f'outcome={outcome!r} must be one of {", ".join(OUTCOMES)}')
    last = jnp.arange(rewards.shape[1])[None] == rollout.num_turns[:, None] - 1
    if outcome == 'answer':
        last &= (rollout.episode_stop == EpisodeStop.TERMINATED)[:, None]
    return jnp.where(last, 0.0, rewards), jnp.where(last, rewards, 0.0).sum(1)


def make_batch(
    rollout: Rollout,
    scores: Scores,
    *,
    group_size: int,
    keep: jax.Array | None = None,
    kl_coef: jax.Array | float = 0.0,
    kl_in_reward: bool = False,
    mode: str = 'mt_cumulative',
    outcome: str = 'answer',
    turn_coef: float = 1.0,
    outcome_coef: float = 1.0,
    turn_gamma: float = 0.9,
    norm: str = 'std',
    eps: float = 1e-4,
    std_floor: float = 0.0,
) -> Batch:
    """One advantage per turn; keep bool [B] marks the rows a filter kept."""
    rows, mask = common.trained(rollout, keep)
    rewards, outcomes = split_rewards(rollout, outcome)
    kl = common.token_kl(scores, mask, kl_coef, kl_in_reward)
    per_turn = turn_credit.turn_advantages(
        rewards - adv.per_turn(kl, rollout.turn, mask, turns=rewards.shape[1]),
        outcomes,
        rollout.num_turns,
        rows,
        group_size=group_size,
        mode=mode,
        turn_coef=turn_coef,
        outcome_coef=outcome_coef,
        gamma=turn_gamma,
        norm=norm,
        eps=eps,
        std_floor=std_floor,
        acts=rollout.acts,
    )
    return common.build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))
