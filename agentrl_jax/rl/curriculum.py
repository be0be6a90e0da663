"""ScalingInter-RL: the maximum number of turns per episode, as a function of the training step.

AgentGym-RL (arXiv:2509.08755) maximises E[r] subject to K_t <= h_t turns, h_1 < h_2 < ... < h_n.
Early episodes are short, so an untrained policy is scored on what it can already do. Later ones are
long enough for the full task. An episode cut at h_t keeps its rewards: no penalty, and no bootstrap
unless loss.bootstrap_truncated is set. Group size, token budget and action budget do not change.

Steps count from 0 here. The released code counts from 1 and uses rounds[min((g - 1) // S, last)] at
step g = step + 1. Its scheduler keeps a counter, which after a checkpoint resumes one step late, or
a full stage early at a stage boundary. A function of the step avoids this.

Released rounds / steps per stage: WebArena 8, 12, 15 / 80; DeepSearch 5, 8, 10 / 100; TextCraft and
SciWorld 10, 20, 30 / 100; BabyAI 6, 13, 20 / 100. In the paper other stages work as well
(DeepSearch 36.8 to 39.1 % over six of them).
"""

import dataclasses
from typing import Annotated

from agentrl_jax.settings.marks import ONE, MustBe


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """ScalingInter-RL in training; validation always plays env.max_turns."""

    rounds: Annotated[tuple[int, ...], MustBe('whole numbers of turns')] = ()  # maximum turns per
    # episode in each stage, such as (2, 3, 5); () = off
    stage_steps: Annotated[int, ONE] = 100  # steps per stage; the last stage lasts to the end

    def turn_limit(self, step: int, max_turns: int) -> int:
        """Return the maximum number of turns at a training step (from 0): max_turns if off.

        Stage i covers steps i * S to (i + 1) * S - 1, S = stage_steps, with rounds[i] turns. The
        last stage never ends.
        """
        if not self.rounds:
            return max_turns
        return self.rounds[min(step // self.stage_steps, len(self.rounds) - 1)]
