"""From a rollout to the Batch of an update: keep groups, score, make the batch."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.imitation.clone import Demonstrations
from agentrl_jax.rl import evol, losses, parity, score
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.rollout import windows
from agentrl_jax.types import Batch, Rollout, TrainState


def prepare(
    state: TrainState,
    ref_params: Any,
    rollout: Rollout,
    task: Any = None,
    base: Any = None,
    *,
    algorithm: Any,
    fns: Any,
    group_size: int,
    settings: dict,
) -> tuple[Batch, jax.Array, jax.Array, dict[str, jax.Array]]:
    """(batch, rows of the rollout int32 [b], their advantages float32 [b, T], metrics).

    settings: 'select' (rollout -> filtering.select), keywords of 'score' and of 'batch'; keywords
    or None: 'trained' of parity.train_on, 'correction' of correct, 'window' of context.windows
    where the policy saw only the last turns (needs the task; the batch then has a row for each
    turn); 'order': None, or which rows stand side by side. base: demonstrations that join the
    batch. Advantages are nan in rows that do not train.
    """
    rollout, rows, keep, factors, metrics = settings['select'](rollout)
    if settings['trained'] is not None:
        rollout = parity.train_on(rollout, **settings['trained'])
    if settings['order'] is not None:
        usable = rollout.healthy & keep & rollout.action_mask.any(1)
        placed = settings['order'](rollout.returns, usable, group_size=group_size)
        taken = (rollout, rows, keep, factors)
        rollout, rows, keep, factors = jax.tree.map(lambda x: x[placed], taken)
    seen = None
    if settings['window'] is not None:
        seen = windows.windows(task, rollout, **settings['window'])
    scores = score.score(
        state.params,
        state.critic_params,
        ref_params,
        rollout,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=fns.values,
        windows=seen,
        **settings['score'],
    )
    batch = algorithm.make_batch(
        rollout,
        scores,
        group_size=group_size,
        keep=keep,
        kl_coef=state.kl_coef,
        **settings['batch'],
    )
    if factors is not None:
        batch = batch.replace(advantages=batch.advantages * factors[:, None])
    if settings['correction'] is not None:
        batch, measured = correct(batch, rollout.logprobs, **settings['correction'])
        metrics |= measured
    metrics['filter/empty'] = (~batch.mask.any()).astype(jnp.float32)
    advantages = jnp.where(batch.mask.any(1, keepdims=True), batch.advantages, jnp.nan)
    if seen is not None:
        batch = windows.split_batch(batch, seen)
    if base is not None:
        batch = with_base(batch, base, state.params, ref_params, fns, settings['score'])
    return batch, rows, advantages, metrics


def with_base(
    batch: Batch, base: Demonstrations, params: Any, ref_params: Any, fns: Any, settings: dict
) -> Batch:
    """The batch with demonstrations among its rows, scored by the policy before the update."""
    scores = score.score(
        params,
        None,
        ref_params,
        base,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=None,
        **settings | {'recompute': True},
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
