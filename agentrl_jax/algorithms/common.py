"""What algorithms share: which tokens train, the batch, the losses around a per-token surrogate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import masked_sum
from agentrl_jax.rl.score import positions_of
from agentrl_jax.types import Batch, Params, Rollout, Scores


def trained(rollout: Rollout, keep: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(rows bool [B], tokens bool [B, T]) that take part: healthy, kept, and sampled."""
    rows = rollout.healthy if keep is None else rollout.healthy & keep
    return rows, rollout.action_mask & rows[:, None]


def token_kl(scores: Scores, mask: jax.Array, kl_coef, kl_in_reward: bool) -> jax.Array:
    """kl_coef (log pi_old - log pi_ref), to be taken off token rewards; 0 if not asked. [B, T]"""
    if not kl_in_reward:
        return jnp.zeros_like(scores.old_logprobs)
    return kl_coef * jnp.where(mask, scores.old_logprobs - scores.ref_logprobs, 0.0)


def episode_returns(
    rollout: Rollout, scores: Scores, mask: jax.Array, kl_coef, kl_in_reward: bool
) -> jax.Array:
    """Return of each episode, penalties included, less its KL where that is in the reward; [B]."""
    return rollout.returns - token_kl(scores, mask, kl_coef, kl_in_reward).sum(1)


def token_rewards(rollout: Rollout, mask: jax.Array, *, reward_on: str) -> jax.Array:
    """[B, T]: each turn's reward and penalty at its end, or the whole return at the last token."""
    if reward_on == 'turn':
        return adv.place_on_turn_ends(rollout.rewards + rollout.penalties, mask, rollout.turn)
    if reward_on == 'episode':
        return adv.place_on_episode_end(rollout.returns, mask)
    raise ValueError(f'reward_on={reward_on!r} must be turn or episode')


def per_turn(x: jax.Array, turn: jax.Array, mask: jax.Array, *, turns: int) -> jax.Array:
    """Sum of a token quantity over each turn: [B, T] -> [B, turns]."""
    rows = jnp.arange(x.shape[0])[:, None]
    index = jnp.where(mask, turn, turns)
    sums = jnp.zeros((x.shape[0], turns + 1), x.dtype).at[rows, index].add(jnp.where(mask, x, 0.0))
    return sums[:, :turns]


def segment_mean(x: jax.Array, segment: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x over the masked tokens of a token's segment (an int in [0, T)); all [B, T]."""
    sums, counts = (per_turn(y, segment, mask, turns=x.shape[1]) for y in (x, jnp.ones_like(x)))
    return adv.to_tokens(sums / jnp.maximum(counts, 1), segment, mask)


def build_batch(
    rollout: Rollout,
    scores: Scores,
    mask: jax.Array,
    advantages: jax.Array,
    *,
    returns: jax.Array | None = None,
    value_mask: jax.Array | None = None,
) -> Batch:
    """The Batch of per-token advantages; without returns nothing is asked of a critic."""
    zeros = jnp.zeros_like(advantages)
    value_mask = mask if value_mask is None else value_mask
    return Batch(
        tokens=rollout.tokens,
        attention_mask=rollout.attention_mask,
        mask=mask,
        value_mask=value_mask if returns is not None else jnp.zeros_like(mask),
        turn=rollout.turn,
        old_logprobs=jnp.where(mask, scores.old_logprobs, 0.0),
        ref_logprobs=jnp.where(mask, scores.ref_logprobs, 0.0),
        advantages=jnp.where(mask, advantages, 0.0),
        returns=zeros if returns is None else jnp.where(value_mask, returns, 0.0),
        old_values=jnp.where(mask, scores.values, 0.0),
    )


def clipped_loss(
    logprobs: jax.Array, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> jax.Array:
    """losses.clipped_policy_loss of a batch; [B, T]."""
    return losses.clipped_policy_loss(
        logprobs,
        batch.old_logprobs,
        batch.advantages,
        batch.mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def ratio_sums(logprobs: jax.Array, batch: Batch, clip_low: float, clip_high: float) -> dict:
    """Sums over trained tokens of what the ratio does; maxima where update.MAXIMA says so."""
    log_ratio = losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)
    ratio = jnp.exp(log_ratio)
    up, down = batch.advantages > 0, batch.advantages < 0
    per_token = {
        'policy/clip_frac_high': up & (ratio > 1.0 + clip_high),
        'policy/clip_frac_low': down & (ratio < 1.0 - clip_low),
        'policy/kl_old': -log_ratio,  # k1 of KL(pi_old || pi)
        'policy/kl_old_k3': ratio - 1.0 - log_ratio,
    }
    sums = {name: masked_sum(x, batch.mask) for name, x in per_token.items()}
    return {
        **sums,
        'policy/ratio_max': jnp.max(jnp.where(batch.mask, ratio, 0.0)),
        'sampler/logprob_gap': jnp.max(jnp.abs(log_ratio)),  # 0 off the mask
    }


def policy_loss(
    params: Params,
    batch: Batch,
    weights: jax.Array,
    kl_coef: jax.Array,
    *,
    hidden_fn: Callable,
    head_fn: Callable,
    loss: Callable = clipped_loss,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_estimator: str | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    row_tokens: int | None = None,
) -> tuple[jax.Array, tuple[dict, jax.Array]]:
    """sum of weights * (surrogate - entropy_coef H + kl_coef KL); (loss, (metric sums, hidden)).

    weights float32 [B, T] from losses.token_weights on the whole optimiser batch. kl_estimator None
    leaves the KL term out. row_tokens: the most that a row can have of trained tokens; the head is
    computed for so many (None: for all).
    """
    hidden = hidden_fn(
        params, batch.tokens, positions_of(batch.attention_mask), batch.attention_mask
    )
    logprobs, entropy = losses.token_logprobs(
        hidden,
        head_fn(params),
        batch.tokens,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=True,
        mask=batch.mask,
        row_tokens=row_tokens,
    )
    per_token = loss(logprobs, batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    sums = ratio_sums(jax.lax.stop_gradient(logprobs), batch, clip_low, clip_high)
    sums['policy/entropy'] = masked_sum(jax.lax.stop_gradient(entropy), batch.mask)
    sums['policy/surrogate'] = losses.weighted_sum(weights, per_token)
    if entropy_coef:
        per_token = per_token - entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    if kl_estimator is not None:
        kl = losses.kl_penalty(logprobs, batch.ref_logprobs, batch.mask, estimator=kl_estimator)
        sums['policy/kl_ref'] = kl.sum()
        per_token = per_token + kl_coef * kl
    return losses.weighted_sum(weights, per_token), (sums, hidden)


def value_loss(
    raw: jax.Array, batch: Batch, weights: jax.Array, *, clip_value: float | None
) -> tuple[jax.Array, dict]:
    """sum of weights * clipped value loss, raw critic output [B, T]; (loss, metric sums)."""
    values = losses.token_values(raw)
    per_token = losses.clipped_value_loss(
        values, batch.old_values, batch.returns, batch.value_mask, clip_value=clip_value
    )
    sums = {}
    if clip_value is not None:
        moved = jnp.abs(values - batch.old_values) > clip_value
        sums['value/clip_frac'] = masked_sum(moved, batch.value_mask)
    return losses.weighted_sum(weights, per_token), sums
