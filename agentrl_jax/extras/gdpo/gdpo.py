"""GDPO: several rewards, each compared in its group before they are added (arXiv:2601.05242).

  a_n[b]     norm(sum_k r_n[b, k])  for a component n credited to the episode
  a_n[b, k]  norm_k(r_n[b, k])      for a component in gdpo.turns, credited to its turn
  s[b, k]    sum_n w_n a_n
  A[b, k]    (s - mean) / (std + eps) over the batch
norm compares the healthy members of a group, norm_k the members that reached turn k. Both are
(x - mean) / (std + eps) with an unbiased std and eps 1e-4; loss.norm=mean omits the division.
w = gdpo.weights, 1 if not listed. Mean and std of the batch count each episode once, as the average
of its turns. The components come from a reward.function that returns a dict; without one there is
REWARD, the reward of the environment. PENALTY, env.format_penalty, is always a component.

GRPO divides the sum by one std, so a component with a small spread hardly counts next to one with
a large spread. Here every component has the same spread before its weight.

The paper has one turn and credits all to the episode. Its code (TRL's normalize_then_sum, verl's
gdpo) has the same formula; verl takes mean and std over tokens. Turns are an addition.

Bias, as an estimator of the gradient of sum_n w_n R_n: each std is a weight that depends on the
episode's return and differs between groups, so groups with rare successes count more. The last
division is one number for the whole batch. norm_k does not credit the decision to take another turn
(see mt_grpo).

A component that is paid in each turn and credited to the episode rewards further turns: with 0.1
for each valid answer, an episode of four turns gets 0.4 and one of two turns 0.2. norm_k compares a
turn only with other turns at its place, so the number of turns does not matter.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import (
    KL,
    KL_IN_LOSS,
    ClippedSurrogate,
    Comparison,
    Weights,
    build_batch,
    trained,
)
from agentrl_jax.rollout.rewards import COMPONENTS
from agentrl_jax.settings.marks import ConfigName
from agentrl_jax.settings.rules import Rule, must

REWARD, PENALTY = 'reward', 'format_penalty'


@dataclasses.dataclass(frozen=True)
class GDPO(ClippedSurrogate):
    kl: KL = KL(0.04)
    weights: Weights = Weights('seq_mean_token_mean')
    comparison: Comparison = Comparison(eps=1e-4)
    component_weights: Annotated[tuple[tuple[str, float], ...], ConfigName('gdpo.weights')] = ()
    # weights of the components, such as (('format', 0.5),); 1 for components that are not listed
    turns: Annotated[tuple[str, ...], ConfigName('gdpo.turns')] = ()  # components that are credited
    # to their turns; the others are credited to the episode

    RULES = (
        must(
            'reward.components',
            f'names other than {PENALTY}, which is env.format_penalty',
            lambda run: PENALTY not in run.reward.components,
        ),
        *(
            must(
                field,
                lambda run: f'names from {", ".join(names_of(run))}',
                lambda run, used=used: used(run.algorithm) <= names_of(run).keys(),
            )
            for field, used in (
                ('gdpo.weights', lambda gdpo: {name for name, _ in gdpo.component_weights}),
                ('gdpo.turns', lambda gdpo: set(gdpo.turns)),
            )
        ),
        Rule({'filter.rule': {'all', 'top_k'}}, 'filters compare the sum of the components'),
        Rule({'filter.keep': 1.0}, 'filters compare the sum of the components'),
        Rule(KL_IN_LOSS, 'components are compared without a KL'),
    )

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Return a batch with one advantage per turn."""
        rows, mask = trained(rollout, keep)
        components = rollout.extra.get(COMPONENTS, {REWARD: rollout.rewards})
        per_turn = self.turn_advantages(
            components | {PENALTY: rollout.penalties},
            rollout.num_turns,
            rows,
            group_size=group_size,
        )
        return build_batch(rollout, scores, mask, adv.to_tokens(per_turn, rollout.turn, mask))

    def turn_advantages(
        self,
        components: Mapping[str, jax.Array],
        num_turns: jax.Array,
        healthy: jax.Array,
        *,
        group_size: int,
    ) -> jax.Array:
        """Return the advantage of each turn from component rewards [B, K]; [B, K]."""
        comparison = dict(dataclasses.asdict(self.comparison), group_size=group_size)
        weights = dict(self.component_weights)
        total = jnp.zeros(())
        for name, rewards in components.items():
            reached = turn_credit.reached_turns(num_turns, healthy, rewards.shape[1])
            r = jnp.where(reached, rewards, 0.0)
            if name in self.turns:
                compared = adv.compare(r, reached, **comparison)
            else:
                scale = jnp.abs(r).sum(1)
                compared = adv.compare(r.sum(1), healthy, scale=scale, **comparison)[:, None]
            total += weights.get(name, 1.0) * compared
        return standardise(total, reached, eps=self.comparison.eps)


def names_of(run: Any) -> dict[str, None]:
    """Return the names of a run's components, in order."""
    return dict.fromkeys((*(run.reward.components or (REWARD,)), PENALTY))


def standardise(x: jax.Array, reached: jax.Array, *, eps: float) -> jax.Array:
    """(x - mean) / (std + eps) over the turns reached; each episode counts once. [B, K]."""
    share = reached / jnp.maximum(reached.sum(1, keepdims=True), 1)
    episodes = reached.any(1).sum()
    centred = x - (share * x).sum() / jnp.maximum(episodes, 1)
    variance = (share * centred**2).sum() / jnp.maximum(episodes - 1, 1)
    return jnp.where(reached, centred / (jnp.sqrt(variance) + eps), 0.0)
