"""One update from one rollout: filter groups -> score -> make the batch -> optimise; in one jit.

`learn` does all of it, `prepare` makes the batch, and `update_step` runs the optimiser steps. Each
mini-batch is one optimiser step. Micro-batches only bound memory: loss weights are computed over
the full mini-batch and micro-batch gradients are summed, so every split gives the same step. In
each mini-batch the critic is updated before the policy. A step is skipped if its loss or gradient
is not finite or if it has no trained token; parameters and optimiser stay unchanged.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agentrl_jax.models.functions import ModelFns, join_critic, on_base, split_critic
from agentrl_jax.rl import evol, losses
from agentrl_jax.rl import metrics as measures
from agentrl_jax.rl.correction import correct
from agentrl_jax.rl.learning import Forward, Learner, UpdateSettings
from agentrl_jax.rl.masked import masked_sum, positions_of
from agentrl_jax.rl.microbatches import Slices, accumulate, sort_trained_first
from agentrl_jax.rl.score import score
from agentrl_jax.rollout.windows import split_batch
from agentrl_jax.types import Batch, Demonstrations, FrozenParams, Params, Rollout, TrainState


def learn(
    state: TrainState,
    frozen: FrozenParams,
    rollout: Rollout,
    key: jax.Array | None = None,
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
    rates = measures.learning_rates(state, settings.optim, settings.critic.updates)
    batch, rows, advantages, metrics = prepare(
        state, frozen, rollout, base, fns=fns, settings=settings
    )
    state, measured = update_step(state, batch, key, fns=fns, settings=settings, frozen=frozen)
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
    batch = algorithm.make_batch(rollout, scores, group_size=settings.group_size, keep=keep)
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


def update_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    fns: ModelFns,
    settings: UpdateSettings,
    frozen: FrozenParams | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run the optimiser steps of a batch, with settings.batch.epochs passes over its rows.

    Without state.critic_params a critic, if any, shares the backbone. Then critic.coef * value loss
    is added to the policy loss, and fns.value_head saves a forward pass. key: permutes the rows;
    None keeps their order. frozen: for extensions. The rows of an episode
    (settings.rows_per_episode) are in one optimiser step and count as one sequence.
    """
    together, weights = settings.rows_per_episode, settings.algorithm.weights
    weigh = functools.partial(
        losses.token_weights,
        aggregation=weights.aggregation,
        norm_length=weights.norm_length,
        episodes=len(batch.tokens) // together,
    )
    rows = minibatch_rows(
        key,
        rows=len(batch.tokens),
        num_minibatches=len(batch.tokens) // (together * settings.batch.minibatch_rows),
        epochs=settings.batch.epochs,
        unit=math.lcm(settings.batch.prefix_rows, together),
    )
    before, learner = state.skipped, Learner(fns, frozen, settings)
    state, steps = jax.lax.scan(lambda s, r: one_step(s, r, batch, weigh, learner), state, rows)
    metrics = measures.reduce_steps(steps)
    metrics |= measures.batch_metrics(batch, fns.values is not None, together)
    metrics['update/skipped'] = (state.skipped - before).astype(jnp.float32)
    return state.replace(step=state.step + 1), metrics


def one_step(
    state: TrainState,
    rows: jax.Array,
    batch: Batch,
    weigh: Callable,
    learner: Learner,
) -> tuple[TrainState, dict]:
    """One mini-batch: critic steps, then the policy step; the metrics describe the last step."""
    settings = learner.settings
    if settings.sparse:
        rows = sort_trained_first(
            rows, batch.mask, settings.microbatches, settings.batch.prefix_rows
        )
    part = jax.tree.map(lambda x: x[rows], batch)
    if settings.layout is not None:
        part = jax.lax.with_sharding_constraint(part, settings.layout)
    episode = None if settings.rows_per_episode == 1 else rows // settings.rows_per_episode
    weights, value_weights = (weigh(mask, episode=episode) for mask in (part.mask, part.value_mask))
    metrics, skipped = {}, jnp.zeros((), jnp.int32)
    if state.critic_params is not None:
        for _ in range(settings.critic.updates):
            state, metrics, finite, applied = critic_step(state, part, value_weights, learner)
            skipped += ~finite
        metrics['update/critic_applied'] = jnp.where(part.value_mask.any(), applied, jnp.nan)
    state, measured, finite, applied = policy_step(state, part, weights, value_weights, learner)
    state = state.replace(skipped=state.skipped + skipped + ~finite)
    metrics |= measured
    # nan, not 0: the critic's warm-up holds the policy on purpose
    metrics['update/applied'] = jnp.where(
        state.step >= settings.critic.warmup_steps, applied, jnp.nan
    )
    # Means exclude steps without a trained token
    trains = part.mask.any()
    return state, {name: jnp.where(trains, x, jnp.nan) for name, x in metrics.items()}


def critic_step(
    state: TrainState, batch: Batch, weights: jax.Array, learner: Learner
) -> tuple[TrainState, dict, jax.Array, jax.Array]:
    """One step of a critic with separate parameters; (state, metrics, finite, applied).

    Frozen parameters have no gradient and no optimiser state and do not count in the gradient norm.
    """
    fns, _, settings = learner
    trained, fixed = split_critic(
        state.critic_params, freeze_attention=settings.critic.freeze_attention
    )

    def loss_of(trained, batch, weights, *, room=0):
        attention, critic = batch.attention_mask, join_critic(trained, fixed)
        row_fns = functions_at(fns, settings.batch.prefix_rows, room)
        raw = row_fns.values(state.params, critic, batch.tokens, positions_of(attention), attention)
        return value_loss(raw, batch, weights, clip_value=settings.critic.clip or None)

    rows, slices, tokens = (batch, weights), Slices.of(settings, fns), batch.value_mask.sum()
    (loss, sums), grads = accumulate(loss_of, trained, rows, batch.value_mask, slices)
    params, opt_state, norm, finite, applied = apply_if_finite(
        settings.optim.tx(settings.optim.critic_lr, settings.critic.updates),
        grads,
        state.critic_opt_state,
        trained,
        loss,
        tokens > 0,
    )
    metrics = {name: x / jnp.maximum(tokens, 1) for name, x in sums.items()}
    metrics |= {'value/loss': loss, 'value/grad_norm': norm}
    state = state.replace(critic_params=join_critic(params, fixed), critic_opt_state=opt_state)
    return state, metrics, finite, applied


def policy_step(
    state: TrainState,
    batch: Batch,
    weights: jax.Array,
    value_weights: jax.Array,
    learner: Learner,
) -> tuple[TrainState, dict, jax.Array, jax.Array]:
    """One step of the policy and a critic in its backbone; (state, metrics, finite, applied)."""
    fns, _, settings = learner
    read = [extra.reads(batch) for extra in settings.extras]
    if state.critic_params is not None:  # updated by critic_step
        fns = fns.replace(value_head=None)
    mask = functools.reduce(jnp.logical_or, read, batch.mask | batch.value_mask)
    extras = [(e, tokens.sum()) for e, tokens in zip(settings.extras, read, strict=True)]
    extra_losses = [
        functools.partial(extra.loss, total=total, learner=learner) for extra, total in extras
    ]

    def loss_of(params, *rows, room=0):
        step_fns = functions_at(fns, settings.batch.prefix_rows, room)
        return policy_loss(params, *rows, step_fns, settings, extra_losses)

    rows, slices = (batch, weights, value_weights), Slices.of(settings, fns)
    (loss, sums), grads = accumulate(loss_of, state.params, rows, mask, slices)
    tokens, value_tokens = batch.mask.sum(), batch.value_mask.sum()
    params, opt_state, norm, finite, applied = apply_if_finite(
        settings.optim.tx(settings.optim.lr),
        grads,
        state.opt_state,
        state.params,
        loss,
        (tokens > 0) & (state.step >= settings.critic.warmup_steps),
    )
    metrics = measures.policy_means(sums, tokens, value_tokens, extras)
    metrics |= {'policy/loss': loss, 'policy/grad_norm': norm}
    return state.replace(params=params, opt_state=opt_state), metrics, finite, applied


def policy_loss(
    params: Params,
    batch: Batch,
    weights: jax.Array,
    value_weights: jax.Array | None,
    fns: ModelFns,
    settings: UpdateSettings,
    extra_losses: Sequence[Callable] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """sum(weights * (surrogate - entropy_coef H + kl.coef KL)); returns (loss, metric sums).

    If a critic shares the backbone (fns.value_head), critic.coef * value loss is added. weights,
    value_weights float32 [B, T]: losses.token_weights of the full optimiser batch. The KL is
    measured if there is a reference; it is in the loss if algorithm.kl.in_loss. extra_losses: of
    extensions, (forward, batch, weights) -> (loss term, metric sums).
    """
    algorithm, attention = settings.algorithm, batch.attention_mask
    rows = batch.tokens, positions_of(attention), attention
    hidden = fns.hidden(params, *rows)
    logprobs, entropy = losses.token_logprobs(
        hidden,
        fns.head(params),
        batch.tokens,
        settings.head,
        with_entropy=True,
        mask=batch.mask,
        allowed=batch.allowed,
    )
    per_token, fixed = algorithm.loss(logprobs, batch), jax.lax.stop_gradient(logprobs)
    sums = measures.policy_sums(fixed, entropy, batch, algorithm)
    sums['policy/surrogate'] = losses.weighted_sum(weights, per_token)
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    if algorithm.kl.in_loss or settings.has_reference:
        estimator = algorithm.kl.estimator if algorithm.kl.in_loss else 'k3'
        kl = losses.kl_penalty(logprobs, batch.ref_logprobs, batch.mask, estimator=estimator)
        sums['policy/kl_ref'] = jax.lax.stop_gradient(kl).sum()
        if algorithm.kl.in_loss:
            per_token = per_token + algorithm.kl.coef * kl
    forward = Forward(params, hidden, fixed)
    added = [extra_loss(forward, batch, weights) for extra_loss in extra_losses]
    total = sum((term for term, _ in added), losses.weighted_sum(weights, per_token))
    for _, measured in added:
        sums |= jax.lax.stop_gradient(measured)
    if fns.value_head is None:
        return total, sums
    raw = fns.value_head(params, hidden)
    value, more = value_loss(raw, batch, value_weights, clip_value=settings.critic.clip or None)
    return total + settings.critic.coef * value, {**sums, **more, 'value/loss': value}


def value_loss(
    raw: jax.Array, batch: Batch, weights: jax.Array, *, clip_value: float | None
) -> tuple[jax.Array, dict]:
    """Clipped value loss from raw critic outputs [B, T]; returns (loss, metric sums)."""
    values = losses.token_values(raw)
    per_token = losses.clipped_value_loss(
        values, batch.old_values, batch.returns, batch.value_mask, clip_value=clip_value
    )
    sums = {}
    if clip_value is not None:
        moved = jnp.abs(values - batch.old_values) > clip_value
        sums['value/clip_frac'] = masked_sum(moved, batch.value_mask)
    return losses.weighted_sum(weights, per_token), sums


def minibatch_rows(
    key: jax.Array | None, *, rows: int, num_minibatches: int, epochs: int, unit: int = 1
) -> jax.Array:
    """Row indices of each optimiser step, int32 [epochs * num_minibatches, rows / num_minibatches].

    Without a key, rows stay in order (RAGEN does not shuffle). With a key, blocks of `unit` rows
    are permuted in each epoch.
    """
    order = jnp.tile(jnp.arange(rows, dtype=jnp.int32)[None], (epochs, 1))
    if key is not None:
        keys = jax.random.split(key, epochs)
        units = jnp.arange(rows, dtype=jnp.int32).reshape(rows // unit, unit)
        order = jax.vmap(lambda k: jax.random.permutation(k, units).reshape(rows))(keys)
    return order.reshape(epochs * num_minibatches, rows // num_minibatches)


def apply_if_finite(
    tx: optax.GradientTransformation,
    grads: Params,
    opt_state: Any,
    params: Params,
    loss: jax.Array,
    allowed: jax.Array | bool,
) -> tuple[Params, Any, jax.Array, jax.Array, jax.Array]:
    """Apply a finite and allowed step; (params, opt_state, gradient norm, finite, applied)."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new_opt_state)
    ok = finite & allowed
    params, opt_state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, (params, opt_state))
    return params, opt_state, norm, finite, ok


def functions_at(fns: ModelFns, unit: int, room: int) -> ModelFns:
    """Return fns for `unit` rows with a shared prefix and `room` columns for the rest; 0: fns."""
    if not room:
        return fns
    shared = fns.sharing(unit=unit, room=room)
    return fns.replace(hidden=shared.hidden, values=fns.values and shared.values)
