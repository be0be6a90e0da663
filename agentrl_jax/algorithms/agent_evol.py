"""AgentEvol: imitation of rewarded episodes, weighted by their reward (arXiv:2406.04151).

  keep b if R_b > threshold;  w_b = R_b / mean of R over kept episodes ('reward'), or 1 ('equal')
  loss = mean over tokens of kept episodes of -w_b log pi
This is the learning step max E[R log pi] of section 4.2 of the paper: RL as inference. The E-step
weights trajectories by reward, and the M-step is weighted maximum likelihood. Dividing by the mean
reward makes the loss and the weight of a demonstration (1) independent of the reward scale. With
rewards of 0 and 1 this is filtered behaviour cloning. The released code only filters ('equal';
threshold .99, SciWorld 99 of 100, BabyAI 0).

rl/evol.py has the rest of the method. In each iteration of evol.iteration steps the policy from its
start explores, and the learner restarts from the policy of step 0. evol.base_rows demonstrations
join the episodes of every step, D_m u D_base. The default is 4 iterations, as in the paper.
Differences from the paper:
  explored episodes are trained on right after they are played, batch.epochs times; the paper first
    collects them and then trains for several epochs;
  a fixed number of base demonstrations per step, not a share of the data;
  all kept episodes of a group count; the released code keeps the first success of an item;
  exploration samples at rollout.temperature (code: greedy for all tasks, 1.2 for WebShop only);
  the learner restarts from the cloned policy, in the paper from the model before cloning.
clip_low, clip_high and dual_clip do not apply: there is no ratio. R is the return with format
penalties. configs/agent_evol.py is the complete method. Tables: the main results on eleven tasks
(BC_base, BC_large, AgentEvol; Llama-2-7B).
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl.algorithm import KL_IN_LOSS, Algorithm, build_batch, trained
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.settings.marks import FINITE, ZERO, ConfigName
from agentrl_jax.settings.rules import Rule
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class AgentEvol(Algorithm):
    threshold: Annotated[float, FINITE, ConfigName('evol.threshold')] = 0.0
    # imitate episodes with a return above this
    weigh_by: Annotated[Literal['reward', 'equal'], ConfigName('evol.weights')] = 'reward'
    # weight of an episode: its return (reward), or equal for all

    RULES = (
        Rule({'evol.threshold': ZERO, 'evol.weights': 'equal'}, 'no weight may be negative'),
        Rule(KL_IN_LOSS, 'returns decide which episodes are kept'),
    )
    HAS_RATIO = False
    EXPLORES = True
    COMPARES_GROUPS = False

    def make_batch(self, rollout, scores, *, group_size, keep=None):
        """Use episode weights as advantages; mask out episodes that are not kept."""
        rows, mask = trained(rollout, keep)
        returns, _ = self.episode_returns(rollout, scores, mask)
        weight = self.episode_weights(returns, rows)
        mask = mask & (weight != 0)[:, None]
        return build_batch(rollout, scores, mask, weight[:, None] * mask)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """-w log pi of each token; [B, T]."""
        current = jnp.where(batch.mask, logprobs, 0.0)
        return -jnp.where(batch.mask, batch.advantages, 0.0) * current

    def episode_weights(self, returns: jax.Array, rows: jax.Array) -> jax.Array:
        """Return the weight of each episode, with mean 1 over the kept ones; float32 [B].

        The weight is 0 unless rows and R > threshold. Weights by reward need a threshold of at
        least 0, because a negative weight is not an imitation.
        """
        imitated = rows & (returns > self.threshold)
        if self.weigh_by == 'equal':
            return imitated.astype(returns.dtype)
        mean = masked_mean(returns, imitated)
        return jnp.where(imitated, returns, 0.0) / jnp.where(mean > 0, mean, 1.0)
