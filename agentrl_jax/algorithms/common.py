"""What algorithms share: which tokens train, rewards on tokens, the batch."""

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.types import Batch, Rollout, Scores

# Fields of a config that concern the update, with the values that most papers share. DEFAULTS of
# an algorithm are these and its own: all fields it takes, each with its paper's value. A value may
# be a function of the most tokens that an episode can sample. PRESETS.md tells their sources.
WITHOUT_RATIO = {
    'loss.kl_coef': 0.0,
    'loss.kl_in': 'loss',
    'loss.kl_estimator': 'k3',
    'loss.aggregation': 'token_mean',
    'loss.norm_length': lambda longest: longest,
    'filter.rule': 'top_k',
    'filter.refill': 0,
}
DEFAULTS = WITHOUT_RATIO | {
    'loss.clip_low': 0.2,
    'loss.clip_high': 0.2,
    'loss.dual_clip': 0.0,
    'loss.entropy_coef': 0.0,
}


def trained(rollout: Rollout, keep: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(rows bool [B], tokens bool [B, T]) that take part: healthy, kept, and sampled."""
    rows = rollout.healthy if keep is None else rollout.healthy & keep
    return rows, rollout.action_mask & rows[:, None]


def token_kl(
    scores: Scores, mask: jax.Array, kl_coef: jax.Array | float, kl_in_reward: bool
) -> jax.Array:
    """kl_coef (log pi_old - log pi_ref), to be taken off token rewards; 0 if not asked. [B, T]"""
    if not kl_in_reward:
        return jnp.zeros_like(scores.old_logprobs)
    return kl_coef * jnp.where(mask, scores.old_logprobs - scores.ref_logprobs, 0.0)


def episode_returns(
    rollout: Rollout,
    scores: Scores,
    mask: jax.Array,
    kl_coef: jax.Array | float,
    kl_in_reward: bool,
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


def segment_mean(x: jax.Array, segment: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x over the masked tokens of a token's segment (an int in [0, T)); all [B, T]."""
    sums, counts = (adv.per_turn(y, segment, mask, turns=x.shape[1]) for y in (x, jnp.ones_like(x)))
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
