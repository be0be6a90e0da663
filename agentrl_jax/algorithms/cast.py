"""CAST: what a turn gained or lost of what the best player could still earn (arXiv:2607.25308).

  A[b, k] = outcome_coef A_E[b] + turn_coef S[b, k] / rms,   A_E as in GRPO
  S[b, k] = sum_{l >= k} lam^(l-k) d[b, l],   d[b, k] = r_k + V*(s_{k+1}) - V*(s_k)
V* is exact, from a solver that is part of the world (optimal_value), within the actions and turns
that are left; 0 after the end. rms is that of S over the trained tokens (scale 'none': 1), and
nothing is centred: 0 means that nothing was lost.

Bias: d is the advantage of the best play, not of the policy's own: it asks what the best player
would make of the next state, where the policy gradient asks what the policy will. With lam = 0, as
in the paper, it is exact for greedy improvement (E[d | s, a] = Q*(s, a) - V*(s), at most 0, and 0
for the best action) and no gradient of the return. With lam = 1 it is G_k - V*(s_k), a baseline,
which adds no bias. A_E alone is GRPO. benchmarks/turn_credit.md has figures.

A V* of the true state knows what the player has not seen: in the library and in Minesweeper a right
guess loses nothing, and looking a card up is worth its reward alone. Penalties of the format count
in r and not in V*, for the best player pays none.

The paper was read in summaries only, its code was not found. There V* is minus the fewest actions
to the goal, so that each step towards it gains 1, of a dead state it is what was left of them, and
asinh compresses d before the division. Here V* is in units of the reward and bounded with it: steps
that cost nothing gain nothing, and asinh is left out. A_E, the clip range and token_mean are those
of its base DAPO; filter.rule=varied with filter.refill gives its dynamic sampling.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

from agentrl_jax.algorithms.turn_grpo import TurnGRPO
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import Clip, Comparison, build_batch, trained
from agentrl_jax.settings.marks import FINITE, SHARE, At


@dataclasses.dataclass(frozen=True)
class CAST(TurnGRPO):
    clip: Clip = Clip(high=0.28)
    comparison: Comparison = Comparison()
    turn_coef: Annotated[float, FINITE, At('turn_credit.turn_coef')] = 0.1  # weight of the
    # turn rewards (cast: of what the solver says of turns)
    outcome_coef: Annotated[float, FINITE, At('turn_credit.outcome_coef')] = 1.0  # weight of
    # the outcome (cast: of the episode's advantage)
    lam: Annotated[float, SHARE] = 0.0  # lambda of GAE, per action token (cast: per turn, of the
    # solver's values)

    NEEDS_OPTIMAL_VALUES = True

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """One advantage per turn."""
        rows, mask = trained(rollout, keep)
        solver = turn_credit.against_best(
            self.turn_rewards(rollout, scores, mask, kl_coef)[0],
            rollout.optimal_values,
            rollout.num_turns,
            rows,
            lam=self.lam,
        )
        returns, scale = self.episode_returns(rollout, scores, mask, kl_coef)
        comparison = dataclasses.asdict(self.comparison)
        outcome = adv.compare(returns, rows, group_size=group_size, scale=scale, **comparison)
        by_turn = self.scaled(adv.to_tokens(solver, rollout.turn, mask), mask)
        advantages = self.outcome_coef * outcome[:, None] * mask + self.turn_coef * by_turn
        return build_batch(rollout, scores, mask, advantages)

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        yield from super().conflicts(run, shards)
        asked = f'algorithm={run.algorithm_name!r}'
        unknown = [w.name for w in run.worlds if not getattr(w, 'values_known', False)]
        if unknown:
            yield (
                f'{asked} needs a solver, and {", ".join(unknown)} has no optimal_value with these '
                'settings (agentrl_jax/envs/README.md names the worlds that have one): take '
                'turn_grpo'
            )
        if run.agent.trials > 1 or run.agent.build().writes:
            yield (
                f'{asked} counts what the turns that are left can earn in one trial: set '
                'agent.name to act or react and agent.trials to 1'
            )
        if run.reward.function:
            yield (
                f"{asked} has a solver for the world's own rewards: reward.function="
                f'{run.reward.function!r} must be left empty'
            )
