"""One update from one rollout: filter groups -> score -> make the batch -> optimise."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns, on_base
from agentrl_jax.rl import evol, losses, update
from agentrl_jax.rl.learning import Learner, UpdateSettings
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.rl.score import score
from agentrl_jax.rollout.windows import split_batch
from agentrl_jax.types import Batch, Demonstrations, FrozenParams, Rollout, TrainState


def learn(
    state: TrainState,
    frozen: FrozenParams,
    rollout: Rollout,
    key: jax.Array | None = None,
    lr_scale: float | jax.Array = 1.0,
    base: Demonstrations | None = None,
    *,
    fns: ModelFns,
    settings: UpdateSettings,
) -> tuple[TrainState, dict[str, jax.Array], jax.Array, jax.Array]:
    """Run one update from one rollout.

    Returns (state, metrics, rows int32 [b] of the update, their advantages float32 [b, T], nan for
    rows that did not train). key: shuffles rows; base: demonstrations to add to the batch.
    """
    fns = on_base(fns, frozen.model)
    rates = update.learning_rates(state, lr_scale, settings.optim, settings.critic.updates)
    batch, rows, advantages, metrics = prepare(
        state, frozen, rollout, base, fns=fns, settings=settings
    )
    state, measured = update.update_step(
        state, batch, key, lr_scale, fns=fns, settings=settings, frozen=frozen
    )
    return state, measured | metrics | rates, rows, advantages


def prepare(
    state: TrainState,
    frozen: FrozenParams,
    rollout: Rollout,
    base: Demonstrations | None = None,
    *,
    fns: ModelFns,
    settings: UpdateSettings,
) -> tuple[Batch, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Return (batch, rollout rows int32 [b], their advantages float32 [b, T], metrics).

    With a context window the batch has one row per turn. Continuations that train follow the row of
    their episode. Advantages are nan in rows that do not train.
    """
    learner, algorithm = Learner(fns, frozen, settings), settings.algorithm
    reference = frozen.reference if algorithm.COMPARES_REFERENCE else None
    rollout, rows, keep, metrics = algorithm.filter.select(
        rollout, groups=settings.num_groups, group_size=settings.group_size
    )
    update_rollout = algorithm.rows(rollout)
    windows = None if settings.context is None else settings.context.windows(update_rollout)
    scores = score(
        state.params,
        state.critic_params,
        reference,
        update_rollout,
        fns=fns,
        settings=settings,
        recompute=settings.sampler.corrects,
        windows=windows,
    )
    for extra in settings.extras:
        scores = extra.score(update_rollout, scores, learner, windows)
    batch = algorithm.make_batch(
        rollout, scores, group_size=settings.group_size, keep=keep, kl_coef=state.kl_coef
    )
    for extra in settings.extras:
        arrays = extra.arrays(update_rollout, batch.mask, learner)
        batch = batch.replace(extra=batch.extra | arrays)
    if settings.sampler.corrects:
        batch, measured = correct(batch, update_rollout.logprobs, settings)
        metrics |= measured
    each = update_rollout.tokens.shape[0] // rollout.tokens.shape[0]
    advantages = jnp.where(batch.mask.any(1, keepdims=True), batch.advantages, jnp.nan)[::each]
    metrics |= algorithm.batch_metrics(batch, each)
    if windows is not None:
        batch = split_batch(batch, windows)
    if base is not None:
        alone = fns.replace(values=None)
        scores = score(
            state.params, None, reference, base, fns=alone, settings=settings, recompute=True
        )
        batch = evol.join(batch, evol.demonstration_batch(base, scores))
    metrics['filter/empty'] = (~batch.mask.any()).astype(jnp.float32)
    return batch, rows, advantages, metrics


def correct(
    batch: Batch, sampler_logprobs: jax.Array, settings: UpdateSettings
) -> tuple[Batch, dict[str, jax.Array]]:
    """Multiply advantages by bounded pi_old / pi_sampler (losses.sampler_weights).

    Truncated importance sampling or IcePop, if sampler and trainer differ. Returns (batch,
    metrics). batch.old_logprobs are the trainer's; sampler_logprobs float32 [B, T].
    """
    rows, sampler = (batch.old_logprobs, sampler_logprobs, batch.mask), settings.sampler
    (low, high), drop = sampler.bounds, sampler.correction == 'icepop'
    weights = losses.sampler_weights(*rows, low=low, high=high, drop=drop)
    raw = losses.sampler_weights(*rows, low=0.0, high=jnp.inf, drop=False)
    gap = jnp.where(batch.mask, jnp.abs(batch.old_logprobs - sampler_logprobs), 0.0)
    return batch.replace(advantages=batch.advantages * weights), {
        'sampler/logprob_gap': gap.max(),
        'sampler/outside': masked_mean((raw < low) | (raw > high), batch.mask),
        'sampler/weight': masked_mean(weights, batch.mask),
    }


def update_settings_of(run: Any, **task: Any) -> UpdateSettings:
    """Return the update settings of a run; task: fields set by its environment and mesh."""
    return UpdateSettings(
        algorithm=run.algorithm,
        batch=run.batch,
        critic=run.critic,
        sampler=run.sampler,
        optim=run.optim,
        num_groups=run.rollout.num_groups,
        group_size=run.rollout.group_size,
        max_turns=run.env.max_turns,
        max_response=run.rollout.max_response,
        temperature=run.rollout.temperature,
        base_rows=run.base_rows,
        has_reference=run.algorithm.uses_reference and run.algorithm.COMPARES_REFERENCE,
        **task,
    )
