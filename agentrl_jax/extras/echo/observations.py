"""Observation losses: the policy also learns to predict observations (ECHO, arXiv:2605.24517).

  loss + coef * mean of -log p(token | what the policy saw before it) over tokens of observations
Observations are the bodies of messages that follow an answer of the same conversation: tool output,
the next state, the reward, and what a prompt's style words around them. Not the first
observation, since no action led to it, nor chat markers, roles, the forced beginning of an answer,
padding, or anything sampled; that is what ECHO's code counts (prime-rl, orchestrator/algo/echo.py,
with a renderer that marks content). It trains messages of the role `tool` alone by default; here
worlds answer as `user`. Its logits are divided by the sampling temperature, these never are: a
world has its own. Its weight is .1.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses
from agentrl_jax.rl.learning import Batching, Extra
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rl.score import score_rows
from agentrl_jax.rollout import windows
from agentrl_jax.types import Params, Rollout


class Markers(NamedTuple):
    """How messages are recognised."""

    start_id: int  # token that opens one
    end_id: int  # ... and closes it
    role: int  # tokens of the role after the first of these


def written(rollout: Rollout, markers: Markers, after: jax.Array | int = 0) -> jax.Array:
    """Tokens of observations in turns above `after` int32 [B]; bool [B, T].

    A token is one if an unsampled start and an unsampled end of its own turn are around it, with no
    other marker between, and a turn of its conversation came before. Worlds cannot forge markers.
    """
    tokens, turn = rollout.tokens, rollout.turn
    given = rollout.attention_mask & ~rollout.action_mask
    opens, ends = given & (tokens == markers.start_id), given & (tokens == markers.end_id)
    place = jnp.arange(tokens.shape[1])[None]
    opened, marked = (
        jax.lax.cummax(jnp.where(mark, place, -1), axis=1) for mark in (opens, opens | ends)
    )
    inside = (opened >= 0) & (opened == marked) & (place - opened > markers.role)
    opened_in = jnp.take_along_axis(turn, jnp.maximum(opened, 0), axis=1)
    closed_in = adv.next_masked(jnp.where(ends, turn, -1), opens | ends, -1)
    inside &= (opened_in == turn) & (closed_in == turn)
    follows = jnp.take_along_axis(answered(rollout), jnp.maximum(turn, 0), axis=1)
    return inside & given & follows & (turn > jnp.reshape(after, (-1, 1)))


def answered(rollout: Rollout) -> jax.Array:
    """Turns whose conversation has had an answer; bool [B, K]."""
    index = jnp.arange(rollout.rewards.shape[1])
    if rollout.branch is None:
        return jnp.broadcast_to(index > 0, rollout.rewards.shape)
    same = rollout.branch[:, :, None] == rollout.branch[:, None, :]
    return (same & (index[None, None, :] < index[None, :, None])).any(-1)


def of_batch(rollout: Rollout, mask: jax.Array, markers: Markers) -> jax.Array:
    """Tokens of observations of rows that train, each token of a world once; bool [B, T].

    mask bool [B, T]: tokens that train. Of a row that repeats the beginning of another one, only
    what follows its first sampled turn counts.
    """
    turns = rollout.rewards.shape[1]
    first = jnp.where(rollout.action_mask, rollout.turn, turns).min(1)
    return written(rollout, markers, first) & mask.any(1, keepdims=True)


def log_likelihood(
    hidden: jax.Array, head: jax.Array, tokens: jax.Array, mask: jax.Array, chunk_size: int
) -> jax.Array:
    """log p of tokens under mask, among all tokens at temperature 1; [B, T], 0 off the mask.

    hidden [B, T, D], head [D, V].
    """
    logprobs, _ = losses.token_logprobs(hidden, head, tokens, chunk_size=chunk_size)
    return jnp.where(mask, logprobs, 0.0)


@dataclasses.dataclass(frozen=True)
class ObservationLoss(Extra):
    """coef * the mean of -log p over the tokens of observations of an optimiser batch."""

    coef: float
    markers: Markers

    METRICS = ('policy/observation_nll',)

    def arrays(self, rollout, mask, models, how):
        return {'observed': of_batch(rollout, mask, self.markers)}

    def reads(self, batch):
        return batch.extra['observed']

    def loss(self, forward, batch, weights, total, models, how):
        head, size = models.fns.head(forward.params), how.batch.head_chunk
        given = batch.tokens, batch.extra['observed'], size
        surprise = -log_likelihood(forward.hidden, head, *given).sum()
        return self.coef * surprise / jnp.maximum(total, 1), {'policy/observation_nll': surprise}


def measure(
    params: Params,
    rollout: Rollout,
    *,
    fns: ModelFns,
    markers: Markers,
    context: windows.Context | windows.Branches | None,
    rows: int,
    batch: Batching,
) -> dict[str, jax.Array]:
    """{'observation_nll/total': -log p of the tokens of observations, summed, and their count}.

    Of healthy episodes among the first `rows`. context: what the policy saw; None = everything.
    """
    count = rollout.tokens.shape[0]
    trusted = rollout.healthy & (jnp.arange(count) < rows)
    mask = written(rollout, markers) & trusted[:, None]
    each = (rollout.tokens, rollout.attention_mask, mask)
    if context is not None:
        found = context.windows(rollout)
        each = (*windows.split_turns(each[:2], found), windows.own_rows(mask, found))

    def of_rows(tokens, attention, mask):
        hidden = fns.hidden(params, tokens, positions_of(attention), attention)
        return -log_likelihood(hidden, fns.head(params), tokens, mask, batch.head_chunk).sum(1)

    total = score_rows(of_rows, each, batch.microbatch_rows).sum()
    return {'observation_nll/total': total, 'observation_nll/count': mask.sum()}
