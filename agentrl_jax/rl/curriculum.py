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
from typing import Annotated

from agentrl_jax.settings.marks import ONE, Words


def horizon(step: int, *, rounds: tuple[int, ...], stage_steps: int) -> int:
    """Turns an episode of training step `step` (from 0) may take.

    Stage i holds the steps i * S to (i + 1) * S - 1, S = stage_steps; its horizon is rounds[i], and
    the last one is kept for ever.
    """
    return rounds[min(step // stage_steps, len(rounds) - 1)]


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """ScalingInter-RL; validation plays env.max_turns."""

    rounds: Annotated[tuple[int, ...], Words('whole numbers of turns')] = ()  # turns of an episode
    # stage by stage, such as (2, 3, 5); () = off
    stage_steps: Annotated[int, ONE] = 100  # steps of a stage; the last stage lasts to the end

    def turn_limit(self, step: int, max_turns: int) -> int:
        """Turns an episode of a training step may take: `horizon`, or all."""
        if not self.rounds:
            return max_turns
        return horizon(step, rounds=self.rounds, stage_steps=self.stage_steps)
