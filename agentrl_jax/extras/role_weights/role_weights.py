"""Weights by role: tokens of thoughts and of actions count differently in an algorithm's loss.

  loss = sum_t weights_t (w_t loss_t - entropy_coef H_t + kl_coef KL_t)
  w_t = loss.thought_weight for a token of a thought
  w_t = H_t / m for another token with loss.action_uncertainty, else 1
weights_t and loss_t are those of the algorithm. H_t is the entropy of the current policy at token
t, without a gradient; m is the mean of -log pi_old over the trained tokens of the rollout outside
thoughts. In expectation m is their mean H at the first update, so weight moves between them and
none is added. Denominators stay: with thought_weight below 1 an update is smaller.

A thought is the sampled text before the matched </think>, or before 'Action:' of a react agent, as
in text.answer.reasoning_length. The tag counts as action. An answer without actions is all thought,
and so is a written plan or reflection.

Source: ActFocus (arXiv:2605.14558) weighs thoughts less and moves weight between the tokens of
actions towards uncertain ones, by their 'energy'. Only its abstract was available, no formula and
no code: H_t, m and the role of the tag are choices made here.

Bias: this is not the gradient of the expected return. The weights depend on the text before a token
and not on the token, so baselines add no bias and the expected step at each token keeps its
direction. But with thought_weight=0 thoughts only drift, and with action_uncertainty an action that
is wrong and certain hardly changes.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import Extra
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.run.hooks import Addition, Extension, Setup
from agentrl_jax.settings.marks import ZERO, ConfigName
from agentrl_jax.settings.rules import Must, exclude
from agentrl_jax.text.answer import ANSWERING, REASONING, AnswerTable
from agentrl_jax.types import Batch, Rollout

TABLE, THOUGHT, MEAN = 'role_table', 'role_thought', 'role_mean'
MIN_MEAN = 1e-6  # nats; a policy without uncertainty has no weight to move
WEIGHABLE = {
    'env.name': Must('an environment on the device', lambda run: not run.on_hosts),
    'algorithm': Must('one without teachers', lambda run: not run.algorithm.other_models),
}
THINKS = {'env.think': Must('True', lambda run: run.answer_opening != '<answer>')}


@dataclasses.dataclass(frozen=True)
class RoleWeights(Extension):
    """Weights of thoughts and actions in the loss."""

    thought_weight: Annotated[float, ZERO, ConfigName('loss.thought_weight')] = 1.0  # weight of
    # the tokens of thoughts; 1 = as actions
    uncertain: Annotated[bool, ConfigName('loss.action_uncertainty')] = False  # weigh the tokens of
    # actions by their entropy

    RULES = (
        *exclude({'loss.thought_weight': 1.0}, WEIGHABLE | THINKS),
        *exclude({'loss.action_uncertainty': False}, WEIGHABLE),
    )

    def load(self, setup: Setup, *, learns: bool) -> Addition:
        weighs = self.thought_weight != 1 or self.uncertain
        return Roles(self) if learns and weighs else Addition()


@dataclasses.dataclass(frozen=True)
class Roles(Addition):
    section: RoleWeights

    def extra(self, task):
        return RoleLoss(self.section.thought_weight, self.section.uncertain)

    def frozen(self, task):
        return {TABLE: jax.tree.map(np.asarray, task.answer)}


@dataclasses.dataclass(frozen=True)
class RoleLoss(Extra):
    """The term sum_t weights_t (w_t - 1) loss_t."""

    thought_weight: float
    uncertain: bool

    def arrays(self, rollout, mask, learner):
        thought = thoughts(rollout, learner.frozen.extra[TABLE])
        mean = masked_mean(-rollout.logprobs, mask & ~thought)
        return {THOUGHT: thought, MEAN: jnp.broadcast_to(mean, len(thought))}

    def loss(self, forward, batch, weights, total, learner):
        fns, settings = learner.fns, learner.settings
        rows = forward.hidden, fns.head(forward.params), batch.tokens, settings.head
        masks = dict(mask=batch.mask, allowed=batch.allowed)
        logprobs, entropy = losses.token_logprobs(*rows, with_entropy=True, **masks)
        factor = self.factors(batch, jax.lax.stop_gradient(entropy))
        per_token = settings.algorithm.loss(logprobs, batch)
        return losses.weighted_sum(weights, (factor - 1.0) * per_token), {}

    def factors(self, batch: Batch, entropy: jax.Array) -> jax.Array:
        """Return w_t; entropy and result float32 [B, T]."""
        action = jnp.ones_like(entropy)
        if self.uncertain:
            action = entropy / jnp.maximum(batch.extra[MEAN], MIN_MEAN)[:, None]
        return jnp.where(batch.extra[THOUGHT], self.thought_weight, action)


def thoughts(rollout: Rollout, table: AnswerTable) -> jax.Array:
    """Return the sampled tokens of thoughts; bool [B, T]."""
    sampled, turn = rollout.action_mask, jnp.maximum(rollout.turn, 0)
    kind = table.token_class.at[rollout.tokens].get(mode='fill', fill_value=table.idle_class)

    def read(state, token):
        tag, last = state
        kind, sampled, turn = token
        tag = jnp.where(turn != last, table.first_tag, tag)
        tag = jnp.where(sampled, table.next_tag[tag, kind].astype(jnp.int32), tag)
        return (tag, turn), table.stage[tag]

    start = jnp.full(len(kind), table.first_tag, jnp.int32), jnp.full(len(kind), -1, jnp.int32)
    stage = jax.lax.scan(read, start, (kind.T, sampled.T, turn.T))[1].T  # [B, T] after each token
    place, row = jnp.arange(kind.shape[1])[None], jnp.arange(len(kind))[:, None]

    def last(stages):
        """Return the last position of a turn in these stages, -1 if there is none; [B, T]."""
        found = jnp.where(sampled & (stage == stages), place, -1)
        of_turn = jnp.full(rollout.rewards.shape, -1).at[row, turn].max(found)
        return jnp.take_along_axis(of_turn, turn, axis=1)

    return sampled & ((place <= last(REASONING)) | (last(ANSWERING) < 0))
