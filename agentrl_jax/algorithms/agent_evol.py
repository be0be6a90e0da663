"""AgentEvol: imitate the episodes that earned a reward, as much as they earned (arXiv:2406.04151).

  keep b if R_b > threshold;  w_b = R_b / mean of R over kept episodes ('reward'), or 1 ('equal')
  loss = mean over tokens of kept episodes of -w_b log pi
This is the learning step max E[R log pi] of the paper's section 4.2: RL as inference, whose E-step
weighs trajectories by reward and whose M-step is weighted maximum likelihood. Dividing by the mean
reward keeps the size of the loss, and the weight of a demonstration (1), apart from the scale of an
environment's rewards; with rewards of 0 and 1 it is filtered cloning. The released code only
filters ('equal'; threshold .99, SciWorld 99 of 100, BabyAI 0).

What is around the loss is in rl/evol.py: in each iteration of evol.iteration steps the policy of
its beginning explores, the learner starts again from the policy of step 0, and
evol.base_rows demonstrations join every step's episodes, D_m u D_base. Defaults: 4 iterations, as
the paper.
It differs from the paper in that
  explored episodes are used when they are played, batch.epochs times, instead of being collected
    first and then trained on for some epochs;
  base demonstrations come as a fixed number of rows per step instead of in proportion to the data;
  all kept episodes of a group count, where the released code keeps the first success of an item;
  exploration samples at rollout.temperature (code: greedy for all tasks, 1.2 for WebShop alone);
  the learner starts again from the cloned policy, the paper's from the model before cloning.
clip_low, clip_high and dual_clip do not apply: there is no ratio. R is the return with format
penalties. configs/agent_evol.py is the whole method. Tables: the main results on eleven tasks
(BC_base, BC_large, AgentEvol; Llama-2-7B).
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl.algorithm import KL_IN_LOSS, Exploring, build_batch, trained
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.settings.marks import FINITE, ZERO, At
from agentrl_jax.settings.rules import Rule
from agentrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class AgentEvol(Exploring):
    threshold: Annotated[float, FINITE, At('evol.threshold')] = 0.0  # episodes whose return is
    # above are imitated
    weigh_by: Annotated[Literal['reward', 'equal'], At('evol.weights')] = 'reward'  # weight of an
    # episode: its return (reward) or equal

    RULES = (
        Rule({'evol.threshold': ZERO, 'evol.weights': 'equal'}, 'no weight may be negative'),
        Rule(KL_IN_LOSS, 'returns decide which episodes are kept'),
    )
    HAS_RATIO = False
    EXPLORES = True
    COMPARES_GROUPS = False

    def make_batch(self, rollout, scores, *, group_size, keep=None, kl_coef=0.0):
        """Advantages are the weights of episodes; those that are not kept leave the mask."""
        rows, mask = trained(rollout, keep)
        returns, _ = self.episode_returns(rollout, scores, mask, kl_coef)
        weight = self.episode_weights(returns, rows)
        mask = mask & (weight != 0)[:, None]
        return build_batch(rollout, scores, mask, weight[:, None] * mask)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """-w log pi of each token; [B, T]."""
        current = jnp.where(batch.mask, logprobs, 0.0)
        return -jnp.where(batch.mask, batch.advantages, 0.0) * current

    def episode_weights(self, returns: jax.Array, rows: jax.Array) -> jax.Array:
        """Of each episode, 0 unless rows and R > threshold, mean 1 over kept ones; float32 [B].

        Weights by reward need a threshold of 0 or more: there is no imitating with negative weight.
        """
        kept = rows & (returns > self.threshold)
        if self.weigh_by == 'equal':
            return kept.astype(returns.dtype)
        mean = masked_mean(returns, kept)
        return jnp.where(kept, returns, 0.0) / jnp.where(mean > 0, mean, 1.0)
