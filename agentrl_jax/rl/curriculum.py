"""ScalingInter-RL: how many turns an episode may take, as a function of the training step.

AgentGym-RL (arXiv:2509.08755) maximises E[r] subject to K_t <= h_t turns, h_1 < h_2 < ... < h_n:
early episodes are short, so that a policy that knows little is scored on what it can already do,
and later ones long enough for the whole task. An episode cut at h_t keeps the rewards it has: no
penalty, and no bootstrap unless loss.bootstrap_truncated asks a critic for one. Nothing else
changes with h_t, neither group size nor token or action budget.

Steps count from 0 here. The release counts them from 1 and takes rounds[min((g - 1) // S, last)] at
step g = step + 1. Its scheduler keeps a counter and comes back from a checkpoint one step late, or
a whole stage early at a border between stages; a function of the step cannot.

Released rounds / steps a stage: WebArena 8, 12, 15 / 80; DeepSearch 5, 8, 10 / 100; TextCraft and
SciWorld 10, 20, 30 / 100; BabyAI 6, 13, 20 / 100. The paper finds other stages as good (DeepSearch
36.8 to 39.1 % over six of them).
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from agentrl_jax.settings.marks import ONE, In, Words
from agentrl_jax.types import EpisodeStop, Rollout

UNKNOWN = 0.5  # success that is expected of a level before it was played: the most uncertain one
LEAST = 1e-6  # weight of a level that is solved, or never is


def horizon(
    step: int, *, rounds: tuple[int, ...], stage_steps: int, interpolate: bool = False
) -> int:
    """Turns an episode of training step `step` (from 0) may take.

    Stage i holds the steps i * S to (i + 1) * S - 1, S = stage_steps; its horizon is rounds[i], and
    the last one is kept for ever. interpolate: the horizon climbs evenly from rounds[i] to
    rounds[i + 1] within the stage, rounded down; both forms agree where stages begin.
    """
    last = len(rounds) - 1
    stage, inside = divmod(step, stage_steps)
    if stage >= last:
        return rounds[last]
    climb = (rounds[stage + 1] - rounds[stage]) * inside // stage_steps if interpolate else 0
    return rounds[stage] + climb


def log_odds(expected: jax.Array, uncertain: float) -> jax.Array:
    """log q, q_l = u p_l (1 - p_l) / sum_m p_m (1 - p_m) + (1 - u) / N, of each of N levels; [N].

    expected: float32 [N], success p that is expected of a level; uncertain: u. p (1 - p) is the
    learnability of arXiv:2408.15099, and the variance of one episode's success. No level is drawn
    less often than in a share (1 - u) of uniform draws.
    """
    weight = expected * (1 - expected) + LEAST
    return jnp.log(uncertain * weight / weight.sum() + (1 - uncertain) / expected.size)


def revised(
    expected: jax.Array, rollout: Rollout, level: jax.Array, *, group_size: int, memory: float
) -> jax.Array:
    """p_l <- m p_l + (1 - m) (mean success of the group that played l); the other levels stay; [N].

    level: int32 [B], group-major; memory: m. Episodes that were lost count for nothing, and neither
    does a group that has no other.
    """
    found = (rollout.episode_stop != EpisodeStop.ENV_ERROR).reshape(-1, group_size)
    solved = (rollout.success.reshape(-1, group_size) & found).sum(1)
    count, level = found.sum(1), level[::group_size]
    mean = solved / jnp.maximum(count, 1)
    before = expected[level]
    after = jnp.where(count > 0, memory * before + (1 - memory) * mean, before)
    return expected.at[level].set(after)


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """ScalingInter-RL, and levels by difficulty; validation plays env.max_turns and every level."""

    rounds: Annotated[tuple[int, ...], Words('whole numbers of turns')] = ()  # turns of an episode
    # stage by stage, such as (2, 3, 5); () = off
    stage_steps: Annotated[int, ONE] = 100  # steps of a stage; the last stage lasts to the end
    interpolate: bool = False  # climb evenly within a stage instead of at its end
    uncertain: Annotated[float, In(low=0, high=1)] = 0.0  # share of the draws of levels that
    # prefers those neither solved nor hopeless, by p (1 - p); 0 = all levels alike
    memory: Annotated[float, In(low=0, high=1)] = 0.5  # of p, when its level is played once more

    def turn_limit(self, step: int, max_turns: int) -> int:
        """Turns an episode of a training step may take: `horizon`, or all."""
        if not self.rounds:
            return max_turns
        stages = dict(stage_steps=self.stage_steps, interpolate=self.interpolate)
        return horizon(step, rounds=self.rounds, **stages)

    def expected(self, levels: int) -> jax.Array | None:
        """Success of each level that is expected at first [levels]; None where nobody asks."""
        return jnp.full(levels, UNKNOWN) if self.uncertain else None

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        yield from self._conflicts_of_levels(run)
        rounds, max_turns = self.rounds, run.env.max_turns
        if self.interpolate and len(rounds) < 2:
            yield f'curriculum.interpolate has no effect with curriculum.rounds={rounds}: give two'
        if any(after <= before for before, after in zip((0, *rounds), rounds, strict=False)):
            yield f'curriculum.rounds={rounds} must be positive and increasing'
        if max(rounds, default=0) > max_turns:
            yield (
                f'curriculum.rounds={rounds} asks for more turns than env.max_turns={max_turns}, '
                'which fixes the shapes of an episode: raise it to the last of the rounds'
            )

    def _conflicts_of_levels(self, run: Any) -> Iterator[str]:
        if not self.uncertain:
            return
        prefers = f'curriculum.uncertain={self.uncertain} chooses levels by the success of earlier'
        others = {
            'env.mix': (run.env.mix, 'episodes of one world'),
            'filter.refill': (
                run.algorithm.filter.refill,
                'steps, and dynamic sampling within one',
            ),
            'fork.value_every': (run.forks.value_every, 'steps, and the critic is measured on any'),
        }
        for name, (value, what) in others.items():
            if value:
                yield f'{prefers} {what}: set one of it and {name} to its default'
        groups, levels = run.rollout.num_groups, run.env.train_levels
        if groups > levels:
            yield (
                f'{prefers} steps, each once in a step, and rollout.num_groups={groups} are more '
                f'than env.train_levels={levels}'
            )
