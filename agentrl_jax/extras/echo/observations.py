"""Observation losses: the policy also learns to predict observations (ECHO, arXiv:2605.24517).

  loss + coef * mean of -log p(token | the policy's context) over tokens of observations
Observations are the bodies of messages after an answer of the same conversation: tool output, the
next state, the reward, and the text of the prompt style around them. The first observation is
excluded, because no action led to it. So are chat markers, roles, the forced start of an answer,
padding and sampled tokens. ECHO's code counts the same tokens (prime-rl,
orchestrator/algo/echo.py, with a renderer that marks content). By default it only trains messages
of the role `tool`; here environments answer as `user`. It divides logits by the sampling
temperature. Here they are not divided, because the environment does not sample with it. ECHO's
weight is .1.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import BatchSettings, Extra
from agentrl_jax.rl.score import TokenRows, score_rows
from agentrl_jax.rollout import windows
from agentrl_jax.types import Params, Rollout


class Markers(NamedTuple):
    """Tokens that delimit messages."""

    start_id: int  # token that opens a message
    end_id: int  # token that closes a message
    role: int  # number of role tokens after start_id


def written(rollout: Rollout, markers: Markers, after: jax.Array | int = 0) -> jax.Array:
    """Return the mask of observation tokens in turns above `after` int32 [B]; bool [B, T].

    An observation token is between an unsampled start and an unsampled end of its turn, without
    other markers in between, after an earlier turn of its conversation. Environments cannot forge
    markers.
    """
    tokens, turn = rollout.tokens, rollout.turn
    unsampled = rollout.attention_mask & ~rollout.action_mask
    opens, ends = unsampled & (tokens == markers.start_id), unsampled & (tokens == markers.end_id)
    place = jnp.arange(tokens.shape[1])[None]
    opened, marked = (
        jax.lax.cummax(jnp.where(mark, place, -1), axis=1) for mark in (opens, opens | ends)
    )
    inside = (opened >= 0) & (opened == marked) & (place - opened > markers.role)
    opened_in = jnp.take_along_axis(turn, jnp.maximum(opened, 0), axis=1)
    closed_in = adv.next_masked(jnp.where(ends, turn, -1), opens | ends, -1)
    inside &= (opened_in == turn) & (closed_in == turn)
    follows = jnp.take_along_axis(answered(rollout), jnp.maximum(turn, 0), axis=1)
    return inside & unsampled & follows & (turn > jnp.reshape(after, (-1, 1)))


def answered(rollout: Rollout) -> jax.Array:
    """Return the mask of turns with an earlier answer in their conversation; bool [B, K]."""
    index = jnp.arange(rollout.rewards.shape[1])
    if rollout.branch is None:
        return jnp.broadcast_to(index > 0, rollout.rewards.shape)
    same = rollout.branch[:, :, None] == rollout.branch[:, None, :]
    return (same & (index[None, None, :] < index[None, :, None])).any(-1)


def of_batch(rollout: Rollout, mask: jax.Array, markers: Markers) -> jax.Array:
    """Return the mask of observation tokens in trained rows, without duplicates; bool [B, T].

    mask bool [B, T]: trained tokens. In a row that repeats the prefix of another one, only tokens
    after its first sampled turn count.
    """
    turns = rollout.rewards.shape[1]
    first = jnp.where(rollout.action_mask, rollout.turn, turns).min(1)
    return written(rollout, markers, first) & mask.any(1, keepdims=True)


def log_likelihood(
    hidden: jax.Array, head: jax.Array, tokens: jax.Array, mask: jax.Array, chunk_size: int
) -> jax.Array:
    """Return log p of masked tokens over the full vocabulary at temperature 1; [B, T], else 0.

    hidden [B, T, D], head [D, V].
    """
    settings = losses.HeadSettings(chunk_size=chunk_size)
    logprobs, _ = losses.token_logprobs(hidden, head, tokens, settings)
    return jnp.where(mask, logprobs, 0.0)


@dataclasses.dataclass(frozen=True)
class ObservationLoss(Extra):
    """coef * mean of -log p over the observation tokens of an optimiser batch."""

    coef: float
    markers: Markers

    METRICS = ('policy/observation_nll',)

    def arrays(self, rollout, mask, learner):
        return {'observed': of_batch(rollout, mask, self.markers)}

    def reads(self, batch):
        return batch.extra['observed']

    def loss(self, forward, batch, weights, total, learner):
        head, size = learner.fns.head(forward.params), learner.settings.batch.head_chunk
        arguments = batch.tokens, batch.extra['observed'], size
        surprise = -log_likelihood(forward.hidden, head, *arguments).sum()
        return self.coef * surprise / jnp.maximum(total, 1), {'policy/observation_nll': surprise}


def measure(
    params: Params,
    rollout: Rollout,
    *,
    fns: ModelFns,
    markers: Markers,
    context: windows.Context | windows.ConversationSpec | None,
    rows: int,
    batch: BatchSettings,
) -> dict[str, jax.Array]:
    """Return the sum of -log p over observation tokens and their number.

    Over the healthy episodes among the first `rows`. context: the policy's; None = everything.
    """
    count = rollout.tokens.shape[0]
    trusted = rollout.healthy & (jnp.arange(count) < rows)
    mask = written(rollout, markers) & trusted[:, None]
    index = None if context is None else context.windows(rollout)
    observed = TokenRows.of(rollout.replace(action_mask=mask, allowed=None), index)

    def of_rows(rows):
        hidden, head = rows.hidden(fns, params), fns.head(params)
        return -log_likelihood(hidden, head, rows.tokens, rows.mask, batch.head_chunk).sum(1)

    total = score_rows(of_rows, (observed,), batch.microbatch_rows).sum()
    return {'observation_nll/total': total, 'observation_nll/count': mask.sum()}
