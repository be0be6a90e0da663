"""From a rollout to the Batch of an update: keep groups, score, make the batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.rl import evol, losses
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.rollout.windows import split_batch
from agentrl_jax.types import Batch, Demonstrations, Params, Rollout, TrainState


@dataclasses.dataclass(frozen=True)
class Learning:
    """The pure functions of an update, each bound to its settings; None = not part of it."""

    select: Callable  # filtering.select of a rollout
    credit: Callable | None  # of a rollout: the same with the rewards that train (trials)
    train_on: Callable | None  # parity.train_on of a rollout: other tokens than the sampled ones
    order: Callable | None  # (returns, usable) -> which rows stand side by side
    windows: Callable | None  # windows.windows of a rollout whose policy saw only the last turns
    score: Callable  # score.score
    make_batch: Callable  # the algorithm's
    correct: Callable | None  # correct, where the sampler is not the trainer
    update: Callable  # update.update_step
    rates: Callable  # update.learning_rates
    with_continuations: bool = False  # the continuations of a rollout have rows in the batch


def prepare(
    state: TrainState,
    ref_params: Params | None,
    rollout: Rollout,
    base: Demonstrations | None = None,
    *,
    fns: Any,
    learning: Learning,
) -> tuple[Batch, jax.Array, jax.Array, dict[str, jax.Array]]:
    """(batch, rows of the rollout int32 [b], their advantages float32 [b, T], metrics).

    Where the policy saw only the last turns the batch has a row for each turn; continuations that
    train have theirs behind their episode's. base: demonstrations that join the batch. Advantages
    are nan in rows that do not train.
    """
    if learning.credit is not None:
        rollout = learning.credit(rollout)
    rollout, rows, keep, factors, metrics = learning.select(rollout)
    if learning.train_on is not None:
        rollout = learning.train_on(rollout)
    if learning.order is not None:
        usable = rollout.healthy & keep & rollout.action_mask.any(1)
        placed = learning.order(rollout.returns, usable)
        taken = (rollout, rows, keep, factors)
        rollout, rows, keep, factors = jax.tree.map(lambda x: x[placed], taken)
    played = rollout.with_continuations if learning.with_continuations else rollout
    windows = None if learning.windows is None else learning.windows(played)
    scores = learning.score(
        state.params,
        state.critic_params,
        ref_params,
        played,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=fns.values,
        windows=windows,
    )
    each = played.tokens.shape[0] // rows.shape[0]  # rows of the batch for an episode
    batch = learning.make_batch(rollout, scores, keep=keep, kl_coef=state.kl_coef)
    if factors is not None:
        batch = batch.replace(
            advantages=batch.advantages * jnp.repeat(factors, each, axis=0)[:, None]
        )
    if learning.correct is not None:
        batch, measured = learning.correct(batch, played.logprobs)
        metrics |= measured
    metrics['filter/empty'] = (~batch.mask.any()).astype(jnp.float32)
    advantages = jnp.where(batch.mask.any(1, keepdims=True), batch.advantages, jnp.nan)[::each]
    if learning.with_continuations:
        trained = batch.mask.any(1).reshape(-1, each).sum(0).astype(jnp.float32)
        metrics |= {'batch/trained_rows': trained[0], 'fork/trained_rows': trained[1:].sum()}
    if windows is not None:
        batch = split_batch(batch, windows)
    if base is not None:
        batch = with_base(batch, base, state.params, ref_params, fns, learning.score)
    return batch, rows, advantages, metrics


def with_base(
    batch: Batch,
    base: Demonstrations,
    params: Params,
    ref_params: Params | None,
    fns: Any,
    score: Callable,
) -> Batch:
    """The batch with demonstrations among its rows, scored by the policy before the update."""
    scores = score(
        params,
        None,
        ref_params,
        base,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=None,
        recompute=True,
        with_next=False,
    )
    return evol.join(batch, evol.base_batch(base, scores))


def correct(
    batch: Batch,
    sampler_logprobs: jax.Array,
    *,
    low: float,
    high: float,
    drop: bool,
    per_sequence: bool,
) -> tuple[Batch, dict[str, jax.Array]]:
    """Advantages times pi_old / pi_sampler, bounded (losses.sampler_weights); (batch, metrics).

    For a sampler that is not the trainer: truncated importance sampling, or with drop IcePop.
    batch.old_logprobs are the trainer's own; sampler_logprobs float32 [B, T].
    """
    rows = (batch.old_logprobs, sampler_logprobs, batch.mask)
    weights = losses.sampler_weights(
        *rows, low=low, high=high, drop=drop, per_sequence=per_sequence
    )
    raw = losses.sampler_weights(
        *rows, low=0.0, high=jnp.inf, drop=False, per_sequence=per_sequence
    )
    gap = jnp.where(batch.mask, jnp.abs(batch.old_logprobs - sampler_logprobs), 0.0)
    return batch.replace(advantages=batch.advantages * weights), {
        'sampler/logprob_gap': gap.max(),
        'sampler/weight': masked_mean(weights, batch.mask),
        'sampler/outside': masked_mean((raw < low) | (raw > high), batch.mask),
    }
