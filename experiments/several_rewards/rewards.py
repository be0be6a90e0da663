"""The rewards of the card catalogue, one by one."""

import jax.numpy as jnp

from agentrl_jax.envs.library.levels import EMPTY, PEOPLE


def parts(rollout, task):
    """Return the format penalty and the environment's own rewards by component; [B, K] each.

    lookup: a card that is new; presence: the card with the answer; outcome: the right answer.
    """
    env, pool = task.env, task.env_params
    action = rollout.actions[:, :, 0]  # -1 if the answer was invalid
    cards, answer = pool.cards[rollout.level], pool.answer[rollout.level][:, None]
    pulled = (action >= 0) & (action < len(PEOPLE))
    card = jnp.take_along_axis(cards, jnp.clip(action, 0, len(PEOPLE) - 1), axis=1)
    same = jnp.tril(action[:, :, None] == action[:, None, :], -1).any(-1)  # as in an earlier turn
    new = pulled & (card != EMPTY) & ~same
    return {
        'format': -0.2 * ~rollout.valid,
        'lookup': env.tool_reward * new,
        'presence': env.presence_reward * (new & (card == len(PEOPLE) + answer)),
        'outcome': env.answer_reward * (action == len(PEOPLE) + answer),
    }


def small_outcome(rollout, task):
    """Return the same with a tenth of the outcome."""
    rewards = parts(rollout, task)
    return rewards | {'outcome': 0.1 * rewards['outcome']}
