"""What reference implementations do otherwise, to be compared with: off unless a config asks.

RAGEN (arXiv:2504.20073) masks its loss by chat messages. Message m of a conversation begins at the
m-th <|im_start|> (1: system, 2: user, 3: assistant, ...), and a token trains when the token before
it lies in a trained message:
  all      every message but the system's, observations included (branch v0423, the paper's runs)
  answers  messages of the policy, those that hold a sampled token. Besides the answer these are
           `assistant`, a line break and the forced beginning of the answer, and after it a line
           break and the next <|im_start|>: tokens that the policy never chose.
Their log-probabilities before the update are the trainer's, as the sampler has none.
"""

import jax
import jax.numpy as jnp

from agentrl_jax.types import Rollout


def message_mask(
    tokens: jax.Array,
    attention_mask: jax.Array,
    action_mask: jax.Array,
    *,
    start_id: int,
    answers_only: bool,
) -> jax.Array:
    """Tokens that RAGEN trains on: bool [B, T]. A marker that the policy sampled opens nothing."""
    opened = (tokens == start_id) & attention_mask & ~action_mask
    message = jnp.cumsum(opened, axis=1)
    before = jnp.pad(message[:, :-1], ((0, 0), (1, 0)))  # message of the token before
    trains = (before > 1) & attention_mask
    if not answers_only:
        return trains
    row = jnp.arange(tokens.shape[0])[:, None]
    answers = jnp.zeros((tokens.shape[0], tokens.shape[1] + 1), bool)
    answers = answers.at[row, message].max(action_mask)
    return trains & answers[row, before]


def train_on(rollout: Rollout, **which: int | bool) -> Rollout:
    """The rollout with message_mask in the place of its sampled tokens."""
    mask = message_mask(rollout.tokens, rollout.attention_mask, rollout.action_mask, **which)
    return rollout.replace(action_mask=mask)
