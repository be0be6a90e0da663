"""MT-GRPO: one advantage per turn, without a critic (arXiv:2505.11821 v1).

  A[b, t] = A[b, k] for a token t of turn k, from turn rewards r and outcomes o, by mode:
  or             w norm(o)                                         GRPO-OR
  mr             norm(c sum_l r_l + w o)                           GRPO-MR: add, then normalise
  mt_v1          w norm(o), plus c norm_0(r_0) in the first turn   MT-GRPO (arXiv:2505.11821 v1)
  mt_cumulative  c sum_{l >= k} norm_l(r_l) + w norm(o)            K turns (arXiv:2604.02869)
  mt_local       c norm_k(r_k) + w norm(o)
  gtpo           norm_k(c sum_{l >= k} gamma^(l-k) r_l + w gamma^(last-k) o)
  hybrid         c norm_k(sum_{l >= k} gamma^(l-k) r_l + gamma^(last-k) o) + w norm(o)
  flattened      the first turn of mt_cumulative in all turns: its content without its placement
norm compares full episodes. norm_k compares turn k over the members that reached it (0 if fewer
than two). c = turn_coef, w = outcome_coef. With two turns mt_cumulative is the paper's estimator.
Turn rewards r are environment rewards and format penalties. `outcome` defines o:
  'answer'   the reward of the last turn if it ended the environment, and that reward is removed
             from r; else 0. These are the paper's R_T and R_O if episodes can run out of turns
  'final'    the reward of the episode's last turn, which is removed from r
  'success'  1 for a solved episode; r are all turn rewards, so a reward for solving counts twice
  'return'   the full return; r are all turn rewards
The normaliser is (x - mean) / (std + 1e-4), as in the paper's code. MT-PPO (v2) is ppo with
reward_on='turn'.

Bias of these estimators of the gradient of c sum_l r_l + w o, if the policy decides when to stop
(measured in benchmarks/turn_credit.md; turn_grpo has none):
  norm_k(r_k)  compares the members that reached turn k. The reward or cost of a further turn does
          not credit the decision to take it. (With two turns, the second worth +1 or -1 to all who
          take it, the advantage of continuing is 0 in both.) mt_v1, mt_cumulative, mt_local,
          flattened
  norm_k(sum_{l >= k} ...)  contains it, but the mean over n members includes the member itself,
          which gives a factor (n - 1) / n, and 0 for n = 1: later turns count less (gtpo, hybrid)
  std     divides by a number that depends on the episode's return; 'mean' does not
  or      excludes the turn rewards from the gradient on purpose
  gamma   below 1 gives the gradient of a discounted return (gtpo, hybrid)
mr and or with norm 'mean' have no bias except for the constant (G - 1) / G. Turns k >= 1 of
independent episodes start from different states. This costs variance, not bias.
"""

import dataclasses
import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import KL_IN_LOSS, ClippedSurrogate, Comparison, build_batch, trained
from agentrl_jax.settings.marks import FINITE, SHARE, ConfigName, NameIn, OnlyIf
from agentrl_jax.settings.rules import Rule, must
from agentrl_jax.types import EpisodeStop, Rollout

PER_TURN = {'turn_credit.mode': set(turn_credit.MODES) - {'or', 'mt_v1'}}
DISCOUNTS = OnlyIf(lambda mt: mt.mode in ('gtpo', 'hybrid'), 'turn_credit.mode=gtpo or hybrid')


@dataclasses.dataclass(frozen=True)
class MTGRPO(ClippedSurrogate):
    mode: Annotated[str, NameIn(turn_credit.MODES), ConfigName('turn_credit.mode')] = (
        'mt_cumulative'  # how
    )
    # turns are credited: see agentrl_jax/algorithms/mt_grpo.py
    outcome: Annotated[
        Literal['success', 'final', 'return', 'answer'], ConfigName('turn_credit.outcome')
    ] = 'answer'  # answer, final, success, return: see agentrl_jax/algorithms/mt_grpo.py
    turn_coef: Annotated[float, FINITE, ConfigName('turn_credit.turn_coef')] = 1.0
    # weight of the turn rewards
    outcome_coef: Annotated[float, FINITE, ConfigName('turn_credit.outcome_coef')] = 1.0
    # weight of the outcome
    turn_gamma: Annotated[float, SHARE, ConfigName('turn_credit.turn_gamma'), DISCOUNTS] = 0.9
    # discount per turn
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

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per turn."""
        rows, mask = trained(rollout, keep)
        rewards, outcomes = split_rewards(rollout, self.outcome)
        scale, outcome_scale = split_rewards(rollout.magnitudes, self.outcome)
        kl, kl_scale = turn_credit.turn_kl(self, rollout, scores, mask)
        per_turn = self.turn_advantages(
            rewards - kl,
            outcomes,
            rollout.num_turns,
            rows,
            group_size=group_size,
            acts=rollout.acts,
            scale=scale + kl_scale,
            outcome_scale=outcome_scale,
        )
        return build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))

    def turn_advantages(
        self,
        rewards: jax.Array,
        outcome: jax.Array,
        num_turns: jax.Array,
        healthy: jax.Array,
        *,
        group_size: int,
        acts: jax.Array | None = None,
        scale: jax.Array | None = None,
        outcome_scale: jax.Array | None = None,
    ) -> jax.Array:
        """Return the advantage of each turn from turn rewards r [B, K], outcomes o [B]; [B, K].

        acts bool [B, K]: turns that step the environment; None: all. In mt_v1, turns that only
        write before the first acting turn count as part of it. scale [B, K], outcome_scale [B]:
        magnitudes of the terms of r and o; None: |r| and |o|.
        """
        reached = turn_credit.reached_turns(num_turns, healthy, rewards.shape[1])
        scale = jnp.abs(rewards) if scale is None else scale
        outcome_scale = jnp.abs(outcome) if outcome_scale is None else outcome_scale
        r, r_scale = (jnp.where(reached, x, 0.0) for x in (rewards, scale))
        o, o_scale = (jnp.where(healthy, x, 0.0).astype(r.dtype) for x in (outcome, outcome_scale))

        c, w = self.turn_coef, self.outcome_coef

        def compare(x, scale, ok):
            x = jnp.where(ok, x, 0.0)
            sizes = dict(group_size=group_size, scale=scale)
            return adv.compare(x, ok, **sizes, **dataclasses.asdict(self.comparison))

        def to_go(c, w):
            terms = (c * r, w * o), (abs(c) * r_scale, abs(w) * o_scale)
            discounted = functools.partial(turn_credit.discounted_to_go, gamma=self.turn_gamma)
            return compare(*(discounted(*x, num_turns) for x in terms), reached)

        def local():
            return c * compare(r, r_scale, reached)

        def suffix():
            return jnp.cumsum(local()[:, ::-1], axis=1)[:, ::-1]

        def merged():
            terms = abs(c) * r_scale.sum(1) + abs(w) * o_scale
            return compare(c * r.sum(1) + w * o, terms, healthy)[:, None]

        outcome_term = w * compare(o, o_scale, healthy)[:, None]
        acted = jnp.ones_like(reached) if acts is None else acts
        first = jnp.cumsum(acted, axis=1) - acted == 0

        def opening():
            earned, terms = (jnp.where(first, x, 0.0).sum(1, keepdims=True) for x in (r, r_scale))
            return jnp.where(first, c * compare(earned, terms, reached[:, :1]), 0.0)

        modes = {
            'or': lambda: outcome_term,
            'mr': merged,
            'mt_v1': lambda: outcome_term + opening(),
            'mt_cumulative': lambda: outcome_term + suffix(),
            'mt_local': lambda: outcome_term + local(),
            'gtpo': lambda: to_go(c, w),
            'hybrid': lambda: c * to_go(1.0, 1.0) + outcome_term,
            'flattened': lambda: outcome_term + suffix()[:, :1],
        }
        return jnp.where(reached, jnp.broadcast_to(modes[self.mode](), r.shape), 0.0)


def split_rewards(rollout: Rollout, outcome: str) -> tuple[jax.Array, jax.Array]:
    """Return (turn rewards [B, K], outcomes [B]) for a definition of the outcome."""
    rewards = rollout.turn_returns
    if outcome == 'success':
        return rewards, rollout.success.astype(rewards.dtype)
    if outcome == 'return':
        return rewards, rewards.sum(1)
    last = jnp.arange(rewards.shape[1])[None] == rollout.num_turns[:, None] - 1
    if outcome == 'answer':
        last &= (rollout.episode_stop == EpisodeStop.TERMINATED)[:, None]
    return jnp.where(last, 0.0, rewards), jnp.where(last, rewards, 0.0).sum(1)
