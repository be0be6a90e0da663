"""Weights by role: which tokens are thoughts, and the loss."""

import jax.numpy as jnp
import numpy as np
import pytest
import test_update as toy_updates
import toy_rollouts as toy

from agentrl_jax.algorithms.grpo import GRPO
from agentrl_jax.algorithms.ppo import PPO
from agentrl_jax.extras.role_weights import role_weights as roles
from agentrl_jax.rl.learning import Learner, UpdateSettings
from agentrl_jax.run.build import check
from agentrl_jax.run.config import effective, read
from agentrl_jax.text import answer
from agentrl_jax.types import FrozenParams
from configs import base

PIECES = [b'a', b'</think>', b'<answer>', b'up', b'</answer>', b'<', answer.END]
A, CLOSE, OPEN, UP, DONE, LESS, END = range(len(PIECES))
FIRST = [A, A, LESS, A, CLOSE, OPEN, UP, DONE]  # an observation and seven sampled tokens
SECOND = [A, A, CLOSE, OPEN, UP]
NO_TAGS = [A, A, UP, END]


def rollout_of(*rows):
    """Return a rollout of rows of turns; a turn is an observed token and sampled ones."""
    tokens = [sum(row, []) for row in rows]
    length = max(map(len, tokens))
    layouts = [[(1, len(turn) - 1) for turn in row] for row in rows]
    rollout = toy.rollout_of(layouts, np.zeros((len(rows), 2)), length=length)
    return rollout.replace(tokens=jnp.array([row + [END] * (length - len(row)) for row in tokens]))


def table(opening='<think>'):
    return answer.build_answer_table(PIECES, ['up'], max_actions=2, opening=opening)


def test_thoughts_are_the_tokens_before_the_matched_tag_by_hand():
    """A '<' in a thought is not a tag; each turn starts anew; without tags all is thought."""
    rollout = rollout_of([FIRST, SECOND], [NO_TAGS], [SECOND, NO_TAGS])
    found = np.asarray(roles.thoughts(rollout, table()))
    want = [[1, 2, 3, 9], [1, 2, 3], [1, 6, 7, 8]]
    assert [np.flatnonzero(row).tolist() for row in found] == want
    assert not roles.thoughts(rollout, table('<answer>')).any()


def test_the_mean_is_of_trained_tokens_outside_thoughts_by_hand():
    rollout = rollout_of([SECOND], [SECOND])
    rollout = rollout.replace(logprobs=-jnp.array([[0.0, 9, 1, 2, 3], [0, 9, 5, 5, 5]]))
    mask = rollout.action_mask & jnp.array([[True], [False]])  # the second episode is dropped
    learner = Learner(None, FrozenParams({}, None, {roles.TABLE: table()}), UpdateSettings(GRPO()))
    arrays = roles.RoleLoss(1.0, True).arrays(rollout, mask, learner)
    np.testing.assert_allclose(arrays[roles.MEAN], [2.0, 2.0])  # (1 + 2 + 3) / 3
    batch = toy.batch_of(GRPO(), rollout, 2).replace(extra=arrays)
    factors = roles.RoleLoss(0.5, True).factors(batch, jnp.full((2, 5), 0.3))
    np.testing.assert_allclose(factors[0, 1:], [0.5, 0.15, 0.15, 0.15])


@pytest.mark.parametrize('algorithm', [PPO(entropy_coef=0.01), GRPO()], ids=['ppo', 'grpo'])
@pytest.mark.parametrize('uncertain', [False, True])
@pytest.mark.parametrize('split', [{}, {'num_microbatches': 4, 'widths': 2}])
def test_a_weight_is_a_factor_of_the_advantage_for_any_split(algorithm, uncertain, split):
    """The surrogate is linear in advantages; entropy bonus and KL are not weighted."""
    state, rollout = toy_updates.state_of(toy.toy_params(0)), toy.random_rollout(0)
    batch = toy.batch_of(algorithm, rollout, 4, toy.scores_of(rollout))
    thought = batch.mask & (jnp.arange(batch.mask.shape[1])[None] % 2 == 0)
    batch = batch.replace(extra={roles.THOUGHT: thought, roles.MEAN: jnp.full(8, 0.7)})
    step = dict(algorithm=algorithm, fns=toy_updates.ALONE)
    extras = (roles.RoleLoss(0.5, uncertain),)
    got, _ = toy_updates.toy_update(**step, **split, extras=extras)(state, batch)
    action = toy.toy_entropies(state.params, batch) / 0.7 if uncertain else 1.0
    scaled = batch.advantages * jnp.where(thought, 0.5, action)
    want, _ = toy_updates.toy_update(**step)(state, batch.replace(advantages=scaled))
    for name, x in want.params.items():
        np.testing.assert_allclose(got.params[name], x, atol=3e-7)


REJECTED = [
    ({'loss.thought_weight': 0.5, 'env.think': False}, 'env.think'),
    ({'loss.action_uncertainty': True, 'env.name': 'textcraft'}, 'env.name'),
]


@pytest.mark.parametrize('changes, field', REJECTED)
def test_what_cannot_be_weighed_is_rejected(changes, field):
    cfg = base.get_config()
    cfg.loss.thought_weight, cfg.loss.action_uncertainty = 0.5, True
    check(read(effective(cfg), None), 1)
    cfg.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=field):
        check(read(effective(cfg), None), 1)
