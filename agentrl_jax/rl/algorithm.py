"""Shared parts of the algorithms: settings groups, the training mask, token rewards and the batch.

Each settings group defines its fields once, with their place in a config (AT). Algorithms hold
groups with the values of their papers; PRESETS.md names the sources.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import losses
from agentrl_jax.rl.filtering import Filter
from agentrl_jax.settings.marks import (
    FINITE,
    ONE,
    SHARE,
    ZERO,
    ConfigName,
    DefaultFrom,
    In,
    NameIn,
    Neutral,
    OnlyIf,
)
from agentrl_jax.settings.tree import NOT_A_SETTING
from agentrl_jax.types import Batch, Rollout, Scores

KL_IN_LOSS = {'loss.kl_coef': 0, 'loss.kl_in': 'loss'}  # required by rules: no KL in the reward


def max_sampled_tokens(run: Any) -> int:
    """Return the maximum number of tokens that an episode can sample."""
    return run.env.max_turns * run.rollout.max_response


# ---- groups of settings --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Range:
    """Clipping range of the ratio pi / pi_old."""

    AT = 'loss.clip_'
    low: Annotated[float, SHARE] = 0.2  # lower bound of the ratio: 1 - clip_low
    high: Annotated[float, ZERO] = 0.2  # upper bound of the ratio: 1 + clip_high


@dataclasses.dataclass(frozen=True)
class Clip(Range):
    """A clipping range with an optional bound of the loss."""

    dual: Annotated[
        float, ConfigName('loss.dual_clip'), In(1, open_low=True, also=(0,)), Neutral(0.0)
    ] = 0.0
    # bound of the ratio for negative advantages (dual clip); 0 = none

    @property
    def keywords(self) -> dict[str, float | None]:
        """Keywords for losses.clipped_surrogate and clipped_sides."""
        return dict(clip_low=self.low, clip_high=self.high, dual_clip=self.dual or None)


@dataclasses.dataclass(frozen=True)
class KL:
    """KL to the initial policy: a loss term, or subtracted from the rewards."""

    AT = 'loss.kl_'
    coef: Annotated[float, ZERO] = 0.0  # weight of the KL to the initial policy; 0 = no reference
    where: Annotated[Literal['loss', 'reward'], ConfigName('loss.kl_in')] = 'loss'
    # where the KL enters
    estimator: Annotated[
        str,
        NameIn(losses.KL_ESTIMATORS),
        OnlyIf(lambda kl: kl.in_loss, 'loss.kl_coef > 0 and loss.kl_in=loss'),
    ] = 'k3'  # k1, k2, k3; k1+, k3+: value of k1, k3 with the gradient of k2

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.where == 'loss'

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.where == 'reward'


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of tokens in the loss (losses.token_weights)."""

    AT = 'loss.'
    aggregation: Annotated[str, NameIn(losses.AGGREGATIONS)] = 'token_mean'  # how tokens are
    # averaged: token_mean, seq_mean_token_mean, seq_mean_token_sum, token_sum_norm
    norm_length: Annotated[
        int | None,
        ONE,
        DefaultFrom(max_sampled_tokens, 'the most tokens that an episode can sample'),
        OnlyIf(lambda w: w.aggregation == 'token_sum_norm', 'loss.aggregation=token_sum_norm'),
    ] = None  # denominator of token_sum_norm


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of the returns in a group (advantages.compare)."""

    AT = 'loss.'
    norm: Annotated[str, NameIn(adv.NORMS)] = 'std'  # normalisation in a group: std, mean, none
    eps: float = dataclasses.field(default=1e-6, metadata=NOT_A_SETTING)  # added to a group's std


# ---- algorithms ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Base class of the algorithms. A subclass adds settings, make_batch and loss."""

    AT = 'loss.'
    kl: KL = KL()
    weights: Weights = Weights()
    filter: Filter = Filter()
    entropy_coef: Annotated[float, FINITE, Neutral(0.0)] = 0.0  # weight of the entropy bonus

    bootstrap_truncated: ClassVar[bool] = False  # needs scores.next_values
    USES_CRITIC: ClassVar[bool] = False  # needs scores.values
    HAS_RATIO: ClassVar[bool] = True  # the loss contains pi / pi_old
    COMPARES_GROUPS: ClassVar[bool] = True  # advantages are relative to the episode's group
    WHOLE_EPISODES: ClassVar[bool] = False  # the loss needs all tokens of an episode in one row
    CREDITS_SEATS: ClassVar[bool] = False  # for self-play only: trains both seats of a game
    COMPARES_REFERENCE: ClassVar[bool] = True  # scores the policy of step 0, if it is used
    EXPLORES: ClassVar[bool] = False  # the policy from the iteration's start plays (AgentEvol)

    def make_batch(
        self,
        rollout: Rollout,
        scores: Scores,
        *,
        group_size: int,
        keep: jax.Array | None = None,
    ) -> Batch:
        """Return the batch of an update; keep bool [B]: rows that the filter kept."""
        raise NotImplementedError

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """Return the loss per token; [B, T]."""
        raise NotImplementedError

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Return the tokens that the loss clips, keyed by metric name; bool [B, T] each."""
        return {}

    @property
    def uses_reference(self) -> bool:
        """Whether the policy of step 0 is needed."""
        return self.kl.coef > 0

    @property
    def other_models(self) -> int:
        """Number of teacher models to learn from instead of rewards."""
        return 0

    def continuations(self, max_turns: int) -> int:
        """Return the maximum number of continuations per episode; 0 = episodes are not forked."""
        return 0

    def rows(self, rollout: Rollout) -> Rollout:
        """Return the rows of an update, grouped by episode: [B n, ...], see rows_per_episode."""
        return rollout

    def rows_per_episode(self, max_turns: int) -> int:
        """Return the number of update rows per episode."""
        return 1 + self.continuations(max_turns)

    def batch_metrics(self, batch: Batch, rows_per_episode: int) -> dict[str, jax.Array]:
        """Return metrics of a batch with all rows of its episodes."""
        del batch, rows_per_episode
        return {}

    def token_kl(self, scores: Scores, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (kl.coef (log pi_old - log pi_ref), the scale of its rounding); [B, T].

        Token rewards are reduced by this KL. Both are 0 unless the KL is in the reward. The scale
        is the sum of the magnitudes of the terms.
        """
        old, ref = scores.old_logprobs, scores.ref_logprobs
        if not self.kl.in_reward:
            return jnp.zeros_like(old), jnp.zeros_like(old)
        terms = (old - ref, jnp.abs(old) + jnp.abs(ref))
        kl, scale = (self.kl.coef * jnp.where(mask, x, 0.0) for x in terms)
        return kl, scale

    def episode_returns(
        self, rollout: Rollout, scores: Scores, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (return - KL in the reward, its rounding scale) per episode; [B]."""
        kl, scale = (x.sum(1) for x in self.token_kl(scores, mask))
        return rollout.returns - kl, rollout.magnitudes.returns + scale


@dataclasses.dataclass(frozen=True)
class ClippedSurrogate(Algorithm):
    """An algorithm with PPO's clipped surrogate (losses.clipped_surrogate)."""

    clip: Clip = Clip()

    def log_ratios(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        """Return the log-ratio of each token, 0 off the mask; [B, T]."""
        return losses.log_ratio(logprobs, batch.old_logprobs, batch.mask)

    def loss(self, logprobs: jax.Array, batch: Batch) -> jax.Array:
        log_ratios = self.log_ratios(logprobs, batch)
        return losses.clipped_surrogate(
            log_ratios, batch.advantages, batch.mask, **self.clip.keywords
        )

    def clipped(self, logprobs: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        log_ratios = self.log_ratios(logprobs, batch)
        return losses.clipped_sides(log_ratios, batch.advantages, **self.clip.keywords)


# ---- batches -------------------------------------------------------------------------------------


def trained(rollout: Rollout, keep: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the (rows bool [B], tokens bool [B, T]) that train.

    Rows must be healthy and kept, tokens must be sampled and not forced by a grammar.
    """
    rows = rollout.healthy if keep is None else rollout.healthy & keep
    return rows, chosen(rollout) & rows[:, None]


def chosen(rollout: Rollout) -> jax.Array:
    """Return the sampled tokens, under a grammar only decision tokens; bool [..., T]."""
    if rollout.allowed is None:
        return rollout.action_mask
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[rollout.success.ndim :]), rollout)
    return decision_tokens(flat).reshape(rollout.action_mask.shape)


def decision_tokens(rollout: Rollout) -> jax.Array:
    """Return the sampled tokens at which the grammar left a choice; bool [B, T].

    All other sampled tokens were the only allowed token: their log-probability is 0 for any policy.
    A turn without a choice keeps its last token, which receives the reward of the turn.
    """
    sampled, turn = rollout.action_mask, rollout.turn
    choice = sampled & (jax.lax.population_count(rollout.allowed).sum(-1) > 1)
    rows, at = jnp.arange(turn.shape[0])[:, None], jnp.maximum(turn, 0)
    chooses = jnp.zeros(rollout.rewards.shape, bool).at[rows, at].max(choice)
    return choice | (adv.turn_ends(sampled, turn) & ~jnp.take_along_axis(chooses, at, axis=1))


def build_batch(
    rollout: Rollout,
    scores: Scores,
    mask: jax.Array,
    advantages: jax.Array,
    *,
    returns: jax.Array | None = None,
    value_mask: jax.Array | None = None,
) -> Batch:
    """Return the Batch for per-token advantages; without returns the critic is not trained."""
    zeros = jnp.zeros_like(advantages)
    value_mask = mask if value_mask is None else value_mask
    return Batch(
        tokens=rollout.tokens,
        attention_mask=rollout.attention_mask,
        mask=mask,
        value_mask=value_mask if returns is not None else jnp.zeros_like(mask),
        turn=rollout.turn,
        allowed=rollout.allowed,
        old_logprobs=jnp.where(mask, scores.old_logprobs, 0.0),
        ref_logprobs=jnp.where(mask, scores.ref_logprobs, 0.0),
        advantages=jnp.where(mask, advantages, 0.0),
        returns=zeros if returns is None else jnp.where(value_mask, returns, 0.0),
        old_values=jnp.where(mask, scores.values, 0.0),
    )
