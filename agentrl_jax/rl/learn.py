"""learn: one update from one rollout. Keep groups -> score -> make the batch -> optimise."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.models.functions import ModelFns, on_base
from agentrl_jax.rl import evol, losses, observations, parity, trials, update
from agentrl_jax.rl.learning import Learning, recomputes
from agentrl_jax.rl.masked import masked_mean
from agentrl_jax.rl.score import score
from agentrl_jax.rollout import windows as context
from agentrl_jax.types import Batch, Demonstrations, Frozen, Params, Rollout, TrainState


def learn(
    state: TrainState,
    frozen: Frozen,
    rollout: Rollout,
    key: jax.Array | None = None,
    lr_scale: float | jax.Array = 1.0,
    base: Demonstrations | None = None,
    *,
    fns: ModelFns,
    how: Learning,
) -> tuple[TrainState, dict[str, jax.Array], jax.Array, jax.Array]:
    """One update from one rollout.

    Returns (state, metrics, rows int32 [b] of the update, their advantages float32 [b, T], nan for
    rows that did not train). A key shuffles; base: demonstrations that join the batch.
    """
    fns = on_base(fns, frozen.model)
    models = zip(how.teachers, frozen.teachers, strict=True)
    reference, own = frozen.reference, ()
    if how.algorithm.teaches_itself:
        reference, own = None, ((fns, frozen.reference),)
    taught = fns.replace(teachers=(*models, *own))
    scoring, learning = (taught, fns) if how.algorithm.scores_teachers else (fns, taught)
    rates = update.learning_rates(state, lr_scale, how.optim, how.critic.updates)
    batch, rows, advantages, metrics = prepare(
        state, reference, rollout, base, frozen.hints, fns=scoring, how=how
    )
    state, measured = update.update_step(state, batch, key, lr_scale, fns=learning, how=how)
    return state, measured | metrics | rates, rows, advantages


def prepare(
    state: TrainState,
    reference: Params | None,
    rollout: Rollout,
    base: Demonstrations | None = None,
    hints: jax.Array | None = None,
    *,
    fns: ModelFns,
    how: Learning,
) -> tuple[Batch, jax.Array, jax.Array, dict[str, jax.Array]]:
    """(batch, rows of the rollout int32 [b], their advantages float32 [b, T], metrics).

    Where the policy saw only the last turns the batch has a row for each turn; continuations that
    train have theirs after their episode's. Advantages are nan in rows that do not train.
    hints: as Frozen.hints.
    """
    rollout = credited(rollout, how)
    rollout, rows, keep, metrics = how.algorithm.filter.select(
        rollout,
        groups=how.num_groups,
        group_size=how.group_size,
        normalised=how.parity.filter_normalised,
    )
    if how.parity.loss_on != 'sampled':
        only = how.parity.loss_on == 'answers'
        rollout = parity.train_on(rollout, start_id=how.start_id, answers_only=only)
    if how.algorithm.ROWS_PER_PAIR > 1:
        usable = rollout.healthy & keep & rollout.action_mask.any(1)
        placed = how.algorithm.order_rows(rollout.returns, usable, group_size=how.group_size)
        taken = (rollout, rows, keep)
        rollout, rows, keep = jax.tree.map(lambda x: x[placed], taken)
    played = how.algorithm.rows(rollout)
    windows = None if how.context is None else how.context.windows(played)
    hint = None if hints is None else hints[rollout.level]
    scores = score(
        state.params,
        state.critic_params,
        reference,
        played,
        windows=windows,
        fns=fns,
        microbatch_rows=how.batch.microbatch_rows,
        recompute=recomputes(how.sampler, how.parity),
        with_next=how.algorithm.bootstraps,
        hint=hint,
        prefix=how.prefix,
        **how.head,
    )
    batch = how.algorithm.make_batch(
        rollout, scores, group_size=how.group_size, keep=keep, kl_coef=state.kl_coef
    )
    if how.observing.coef:
        observed = observations.of_batch(played, batch.mask, how.markers)
        batch = batch.replace(observed=observed)
    batch = batch.replace(hint=hint)
    each = played.tokens.shape[0] // rows.shape[0]  # rows of the batch for an episode
    if how.sampler.corrects:
        batch, measured = correct(batch, played.logprobs, how)
        metrics |= measured
    advantages = jnp.where(batch.mask.any(1, keepdims=True), batch.advantages, jnp.nan)[::each]
    metrics |= how.algorithm.batch_metrics(batch, each)
    if windows is not None:
        batch = context.split_batch(batch, windows)
    if base is not None:
        batch = with_base(batch, base, state.params, reference, fns=fns, how=how)
    metrics['filter/empty'] = (~batch.mask.any()).astype(jnp.float32)
    return batch, rows, advantages, metrics


def credited(rollout: Rollout, how: Learning) -> Rollout:
    """The rollout with the rewards that train: those that the worlds paid, or what trials gain."""
    if not how.gain:
        return rollout
    return trials.gain_rewards(rollout, local=how.algorithm.credits_locally)


def correct(
    batch: Batch, sampler_logprobs: jax.Array, how: Learning
) -> tuple[Batch, dict[str, jax.Array]]:
    """Multiply advantages by pi_old / pi_sampler, bounded (losses.sampler_weights).

    For a sampler that is not the trainer: truncated importance sampling, or IcePop. Returns (batch,
    metrics). batch.old_logprobs are the trainer's own; sampler_logprobs float32 [B, T].
    """
    rows, sampler = (batch.old_logprobs, sampler_logprobs, batch.mask), how.sampler
    (low, high), drop = sampler.bounds, sampler.correction == 'icepop'
    one = dict(per_sequence=sampler.sequence)
    weights = losses.sampler_weights(*rows, low=low, high=high, drop=drop, **one)
    raw = losses.sampler_weights(*rows, low=0.0, high=jnp.inf, drop=False, **one)
    gap = jnp.where(batch.mask, jnp.abs(batch.old_logprobs - sampler_logprobs), 0.0)
    return batch.replace(advantages=batch.advantages * weights), {
        'sampler/logprob_gap': gap.max(),
        'sampler/outside': masked_mean((raw < low) | (raw > high), batch.mask),
        'sampler/weight': masked_mean(weights, batch.mask),
    }


def with_base(
    batch: Batch,
    base: Demonstrations,
    params: Params,
    reference: Params | None,
    *,
    fns: ModelFns,
    how: Learning,
) -> Batch:
    """The batch with demonstrations among its rows, scored by the policy before the update."""
    scores = score(
        params,
        None,
        reference,
        base,
        fns=fns.replace(values=None),
        microbatch_rows=how.batch.microbatch_rows,
        recompute=True,
        **how.head,
    )
    shown = evol.base_batch(base, scores)
    if batch.observed is not None:  # demonstrations are answers to imitate
        shown = shown.replace(observed=jnp.zeros_like(shown.mask))
    return evol.join(batch, shown)


def learning_of(run: Any, **task: Any) -> Learning:
    """The settings of an update of a run's config; task: what only its worlds and mesh say."""
    return Learning(
        algorithm=run.algorithm,
        batch=run.batch,
        critic=run.critic,
        sampler=run.sampler,
        parity=run.parity,
        observing=run.observing,
        optim=run.optim,
        num_groups=run.rollout.num_groups,
        group_size=run.rollout.group_size,
        max_turns=run.env.max_turns,
        max_response=run.rollout.max_response,
        temperature=run.rollout.temperature,
        base_rows=run.base_rows,
        gain=run.agent.reward == 'gain',
        has_reference=run.needs_reference and not run.algorithm.teaches_itself,
        **task,
    )
