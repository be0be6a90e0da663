"""score: values and log-probabilities of a rollout under critic, reference, teachers and policy."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import hints, losses
from agentrl_jax.rl.masked import positions_of
from agentrl_jax.rollout import windows as context
from agentrl_jax.text.grammar import Bits
from agentrl_jax.types import Params, Rollout, Scores


def score_rows(fn: Callable, rows: tuple, microbatch_rows: int) -> Any:
    """fn over slices of microbatch_rows rows, one after another; results put back together.

    Only what a filter keeps must be a multiple of microbatch_rows. Other numbers of rows get equal
    slices of at least half of that, or copies of the first row fill the last slice.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    limit = min(microbatch_rows, count)
    size = math.gcd(count, microbatch_rows)
    size = limit if 2 * size < limit else size
    total = -(-count // size) * size
    if total > count:
        rows = jax.tree.map(
            lambda x: jnp.concatenate([x, jnp.repeat(x[:1], total - count, axis=0)]), rows
        )
    # Row i goes to slice i % n, so that every slice has rows of each device's block.
    parts = jax.tree.map(
        lambda x: x.reshape(size, total // size, *x.shape[1:]).swapaxes(0, 1),
        rows,
    )
    out = jax.lax.map(lambda part: fn(*part), parts)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(total, *x.shape[2:])[:count], out)


def score(
    params: Params,
    critic_params: Params | None,
    ref_params: Params | None,
    rollout: Rollout,
    *,
    fns: ModelFns,
    microbatch_rows: int,
    temperature: float,
    chunk_size: int,
    recompute: bool,
    row_tokens: int | None = None,
    bits: Bits | None = None,
    with_next: bool = False,
    windows: context.Windows | None = None,
    hint: jax.Array | None = None,
    prefix: int = 0,
) -> Scores:
    """Scores of every token; zeros where no model is given.

    The old log-probabilities are the sampler's own; `recompute` asks the trainer's forward pass
    again (for a sampler of another precision). Where there are fns.teachers the mixture of their
    probabilities is in the place of the reference. row_tokens, bits: as in
    losses.token_logprobs. with_next: the values after tokens as well (not with windows).
    With windows every token is scored after what the policy saw of the conversation.
    hint int32 [B, H]: what the teachers read after the `prefix` tokens (rl.hints); None: nothing.
    """
    rows = (rollout.tokens, rollout.attention_mask, rollout.action_mask)
    if rollout.allowed is not None:
        rows += (rollout.allowed,)
    zeros = jnp.zeros_like(rollout.logprobs)
    if windows is not None:
        own = context.own_rows(rows[2], windows)
        tokens, attention, *more = context.split_turns((*rows[:2], *rows[3:]), windows)
        rows = (tokens, attention, own, *more)
        hint = context.of_episode(hint, windows)

    def logprobs(fns, model, tokens, attention, mask, allowed=None, *, hint=None):
        hidden = hints.hidden(fns, model, tokens, attention, hint, prefix=prefix)
        return losses.token_logprobs(
            hidden,
            fns.head(model),
            tokens,
            temperature=temperature,
            chunk_size=chunk_size,
            mask=mask,
            row_tokens=row_tokens,
            bits=bits,
            allowed=allowed,
        )[0]

    def taught(hint, *rows):
        return losses.mixture([logprobs(*one, *rows, hint=hint) for one in fns.teachers])

    def values(tokens, attention):
        raw = fns.values(params, critic_params, tokens, positions_of(attention), attention)
        return (losses.token_values(raw), raw) if with_next else losses.token_values(raw)

    def every(fn, *rows):
        scores = score_rows(fn, rows, microbatch_rows)
        if windows is None:
            return scores
        longest = rollout.tokens.shape[1]
        return jax.tree.map(lambda x: context.put_back(x, windows, longest), scores)

    old, ref, value, following = rollout.logprobs, zeros, zeros, None
    if recompute:
        old = every(lambda *x: logprobs(fns, params, *x), *rows)
    if ref_params is not None:
        ref = every(lambda *x: logprobs(fns, ref_params, *x), *rows)
    if fns.teachers:
        ref = every(taught, hint, *rows)
    if fns.values is not None:
        value = every(values, *rows[:2])
        if with_next:
            value, following = value
    mask = rollout.action_mask
    scores = Scores(*(jnp.where(mask, x, 0.0) for x in (old, ref, value)))
    if following is None:
        return scores
    return scores.replace(next_values=jnp.where(mask, following, 0.0))
