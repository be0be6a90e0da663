"""Optimiser steps over one batch: (state, batch) -> (state, metrics), all in one jit.

Each mini-batch is one optimiser step. Micro-batches only bound memory: loss weights are computed
over the full mini-batch and micro-batch gradients are summed, so every split gives the same step.
In each mini-batch the critic is updated before the policy. A step is skipped if its loss or
gradient is not finite or if it has no trained token; parameters and optimiser stay unchanged.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agentrl_jax.models.functions import ModelFns, join_critic, split_critic
from agentrl_jax.rl import losses, objective
from agentrl_jax.rl.advantages import equal
from agentrl_jax.rl.algorithm import KL
from agentrl_jax.rl.learning import Learner, Optim, UpdateSettings
from agentrl_jax.rl.masked import masked_max, masked_mean, masked_var, positions_of
from agentrl_jax.rl.microbatches import Slices, accumulate, sort_trained_first
from agentrl_jax.rl.objective import GAP, MAXIMA
from agentrl_jax.types import Batch, FrozenParams, Params, TrainState

NOT_PER_TOKEN = (*MAXIMA, 'policy/surrogate', 'value/loss')  # not divided by a token count


def learning_rates(
    state: TrainState, lr_scale: jax.Array | float, optim: Optim, critic_updates: int = 1
) -> dict[str, jax.Array]:
    """Return the learning rates of the next optimiser step as metrics; float32 [].

    A critic that shares the policy's backbone has no separate rate.
    """

    def at(rate, opt_state):
        if callable(rate):
            rate = rate(opt_state[1][0].count)  # Adam's count: excludes skipped steps
        return jnp.float32(rate) * lr_scale

    rates = {'optim/lr': at(optim.rate(optim.lr), state.opt_state)}
    if state.critic_params is not None:
        rate = optim.rate(optim.critic_lr, critic_updates)
        rates['optim/critic_lr'] = at(rate, state.critic_opt_state)
    return rates


def trained_episodes(mask: jax.Array, together: int) -> jax.Array:
    """Count episodes with a trained token; mask bool [B, T], `together` adjacent rows each."""
    trains = mask.any(1)
    return trains.sum() if together == 1 else trains.reshape(-1, together).any(1).sum()


def adaptive_kl_coef(state: TrainState, batch: Batch, kl: KL, together: int) -> jax.Array:
    """kl_coef (1 + clip(KL / target - 1, -0.2, 0.2) episodes / horizon) (arXiv:1909.08593, 2.2).

    KL is the batch mean of log pi_old - log pi_ref. A non-finite KL leaves the coefficient as is.
    """
    mean = masked_mean(batch.old_logprobs - batch.ref_logprobs, batch.mask)
    error = jnp.clip(mean / kl.target - 1.0, -0.2, 0.2)
    new = state.kl_coef * (1.0 + error * trained_episodes(batch.mask, together) / kl.horizon)
    return jnp.where(jnp.isfinite(new), new, state.kl_coef)


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
    lr_scale: jax.Array | float,
) -> tuple[Params, Any, jax.Array, jax.Array, jax.Array]:
    """Apply a finite and allowed step; (params, opt_state, gradient norm, finite, applied)."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, new_opt_state = tx.update(grads, opt_state, params)
    updates = jax.tree.map(lambda x: x * lr_scale, updates)  # AdamW is linear in the rate
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


def critic_step(
    state: TrainState, batch: Batch, weights: jax.Array, lr_scale: Any, learner: Learner
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
        return objective.value_loss(raw, batch, weights, clip_value=settings.critic.clip or None)

    rows, slices, tokens = (batch, weights), Slices.of(settings, fns), batch.value_mask.sum()
    (loss, sums), grads = accumulate(loss_of, trained, rows, batch.value_mask, slices)
    params, opt_state, norm, finite, applied = apply_if_finite(
        settings.optim.tx(settings.optim.critic_lr, settings.critic.updates),
        grads,
        state.critic_opt_state,
        trained,
        loss,
        tokens > 0,
        lr_scale,
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
    lr_scale: Any,
    learner: Learner,
) -> tuple[TrainState, dict, jax.Array, jax.Array]:
    """One step of the policy and a critic in its backbone; (state, metrics, finite, applied)."""
    fns, _, settings = learner
    read = [extra.reads(batch) for extra in settings.extras]
    if state.critic_params is not None:  # updated by critic_step
        fns = fns.replace(value_head=None)
    mask = functools.reduce(jnp.logical_or, read, batch.mask | batch.value_mask)
    totals = [tokens.sum() for tokens in read]
    extra_losses = [
        functools.partial(extra.loss, total=total, learner=learner)
        for extra, total in zip(settings.extras, totals, strict=True)
    ]

    def loss_of(params, *rows, room=0):
        step_fns = functions_at(fns, settings.batch.prefix_rows, room)
        return objective.policy_loss(params, *rows, state.kl_coef, step_fns, settings, extra_losses)

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
        lr_scale,
    )
    counts = {name: value_tokens if name.startswith('value/') else tokens for name in sums}
    counts |= dict.fromkeys(NOT_PER_TOKEN, 1)
    for extra, total in zip(settings.extras, totals, strict=True):
        counts |= dict.fromkeys(extra.METRICS, total)
    metrics = {name: x / jnp.maximum(counts[name], 1) for name, x in sums.items()}
    metrics |= {'policy/loss': loss, 'policy/grad_norm': norm}
    return state.replace(params=params, opt_state=opt_state), metrics, finite, applied


def one_step(
    state: TrainState,
    rows: jax.Array,
    batch: Batch,
    weigh: Callable,
    lr_scale: Any,
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
            state, metrics, finite, applied = critic_step(
                state, part, value_weights, lr_scale, learner
            )
            skipped += ~finite
        metrics['update/critic_applied'] = jnp.where(part.value_mask.any(), applied, jnp.nan)
    state, measured, finite, applied = policy_step(
        state, part, weights, value_weights, lr_scale, learner
    )
    state = state.replace(skipped=state.skipped + skipped + ~finite)
    metrics |= measured
    # nan, not 0: the critic's warm-up holds the policy on purpose
    metrics['update/applied'] = jnp.where(
        state.step >= settings.critic.warmup_steps, applied, jnp.nan
    )
    # Means exclude steps without a trained token
    trains = part.mask.any()
    return state, {name: jnp.where(trains, x, jnp.nan) for name, x in metrics.items()}


def update_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array | None = None,
    lr_scale: jax.Array | float = 1.0,
    *,
    fns: ModelFns,
    settings: UpdateSettings,
    frozen: FrozenParams | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run the optimiser steps of a batch, with settings.batch.epochs passes over its rows.

    Without state.critic_params a critic, if any, shares the backbone. Then critic.coef * value loss
    is added to the policy loss, and fns.value_head saves a forward pass. key: permutes the rows;
    None keeps their order. lr_scale: factor of both learning rates. frozen: for extensions. The
    rows of an episode (settings.rows_per_episode) are in one optimiser step and count as one
    sequence.
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
    state, steps = jax.lax.scan(
        lambda s, r: one_step(s, r, batch, weigh, lr_scale, learner), state, rows
    )
    metrics = reduce_steps(steps) | batch_metrics(batch, fns.values is not None, together)
    metrics['update/skipped'] = (state.skipped - before).astype(jnp.float32)
    metrics['policy/kl_coef'] = state.kl_coef
    if settings.algorithm.kl.target:
        adapted = adaptive_kl_coef(state, batch, settings.algorithm.kl, together)
        moves = state.step >= settings.critic.warmup_steps  # during the warm-up the KL is 0
        state = state.replace(kl_coef=jnp.where(moves, adapted, state.kl_coef))
    return state.replace(step=state.step + 1), metrics


def reduce_steps(steps: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Reduce metrics over optimiser steps, [S] -> []: means, and maxima for MAXIMA.

    Only finite values count. Without any the result is nan: an update that trained nothing must not
    look like a loss of 0.
    """
    out = {}
    for name, x in steps.items():
        finite = jnp.isfinite(x)
        value = masked_max(x, finite) if name in MAXIMA else masked_mean(x, finite)
        if name == GAP:  # the policy differs from the sampling policy in later steps
            value = x[jnp.argmax(finite)]
        out[name] = jnp.where(finite.any(), value, jnp.nan).astype(jnp.float32)
    return out


def batch_metrics(batch: Batch, has_critic: bool, together: int = 1) -> dict[str, jax.Array]:
    """Metrics of a batch before its update: trained tokens, advantages, explained variance.

    together: rows per episode.
    """
    counts = {
        'batch/trained_tokens': batch.mask.sum(),
        'batch/trained_rows': trained_episodes(batch.mask, together),
        'batch/tokens': (batch.attention_mask & batch.mask.any(1, keepdims=True)).sum(),
    }
    metrics = {name: x.astype(jnp.float32) for name, x in counts.items()}
    metrics['batch/advantage_std'] = jnp.sqrt(masked_var(batch.advantages, batch.mask))
    if has_critic:
        # 1 - var(R - V) / var(R); 0 if the returns vary only by rounding
        spread = masked_var(batch.returns, batch.value_mask)
        rest = masked_var(batch.returns - batch.old_values, batch.value_mask)
        scale = jnp.abs(batch.returns) + jnp.abs(batch.old_values)
        varied = ~equal(batch.returns, batch.value_mask, scale)
        explained = jnp.where(varied, 1.0 - rest / jnp.where(varied, spread, 1.0), 0.0)
        metrics['value/explained_variance'] = explained
    return metrics
