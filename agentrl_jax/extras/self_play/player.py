"""Rollouts of two-player games: the seat of each turn, and snapshots as opponents."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.models.base import KVCache
from agentrl_jax.rollout.rows import Player, Rows
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes, Params, Rollout

# In Rollout.extra
SEATS = 'seats'  # int32 [B, K]  seat that plays a turn; rewards are those of seat 0, and seat 1
# earns minus that
LEARNER = 'learner'  # int32 [B]  seat of the policy if a snapshot plays the other seat


@struct.dataclass
class ActorAndOpponent:
    """A value for the policy and one for its opponent, a snapshot of the policy."""

    policy: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class Seated(Player):
    """The policy plays both seats, and the rollout records the seat of each turn."""

    def rollout_extra(self, episodes: Episodes, turns: int) -> dict[str, jax.Array]:
        return {SEATS: jnp.zeros((episodes.level.shape[0], turns), jnp.int32)}

    def record(self, out: Rollout, at: Any, task: text.TextTask, world: text.Episode) -> Rollout:
        seats = jax.vmap(task.env.seat)(world.state)
        seats = out.extra[SEATS].at[at].set(seats, mode='drop')
        return out.replace(extra=out.extra | {SEATS: seats})


@dataclasses.dataclass(frozen=True)
class WithOpponent(Seated):
    """A snapshot plays one seat; parameters and caches are an ActorAndOpponent.

    Every token goes through both models, with separate caches. A row uses the hidden states of the
    model that plays its turn (Rows.player bool [S]: the opponent). The policy has seat 0 in
    episodes with even token streams, otherwise seat 1. Only its tokens are action tokens of the
    rollout. Requires context.window=1.
    """

    def each(self, function: Callable[[Params], Any], params: ActorAndOpponent) -> ActorAndOpponent:
        return ActorAndOpponent(function(params.policy), function(params.other))

    def empty_cache(
        self, params: ActorAndOpponent, prefix: jax.Array, rows: int, cache_tokens: int
    ) -> ActorAndOpponent:
        empty = super().empty_cache
        return self.each(lambda one: empty(one, prefix, rows, cache_tokens), params)

    def empty_state(self, rows: int) -> jax.Array:
        return jnp.zeros(rows, bool)

    def forward(
        self,
        rows: Rows,
        params: ActorAndOpponent,
        tokens: jax.Array,
        position: jax.Array,
        which: Any,
    ) -> tuple[jax.Array, KVCache]:
        block, cache = (tokens, position), rows.cache
        policy, own = self.model.forward_cached(params.policy, *block, cache.policy, which)
        opponent, others = self.model.forward_cached(params.other, *block, cache.other, which)
        other = rows.player if which is None else rows.player.at[which].get(mode='clip')
        hidden = jnp.where(other[:, None, None], opponent, policy)
        return hidden, ActorAndOpponent(own, others)

    def logits(self, rows: Rows, params: ActorAndOpponent, head: Any = None) -> jax.Array:
        heads = ActorAndOpponent(None, None) if head is None else head
        policy = self.model.logits(params.policy, rows.hidden, heads.policy)
        other = self.model.logits(params.other, rows.hidden, heads.other)
        return jnp.where(rows.player[:, None], other, policy)

    def rollout_extra(self, episodes: Episodes, turns: int) -> dict[str, jax.Array]:
        learner = episodes.token_stream % 2
        return super().rollout_extra(episodes, turns) | {LEARNER: learner}

    def seat(
        self,
        rows: Rows,
        which: jax.Array,
        task: text.TextTask,
        world: text.Episode,
        out: Rollout,
        episode: jax.Array,
    ) -> Rows:
        learner = out.extra[LEARNER]
        learner = learner[jnp.minimum(episode, learner.shape[0] - 1)]
        other = jax.vmap(task.env.seat)(world.state) != learner
        return rows.replace(player=rows.player.at[which].set(other, mode='drop'))

    def sampled(self, rows: Rows, live: jax.Array, **token: Any) -> tuple[dict[str, Any], Any]:
        is_policy = ~rows.player
        logprobs = jnp.where(is_policy, token['logprobs'], 0.0)
        fields = token | {'logprobs': logprobs, 'attention_mask': True, 'action_mask': is_policy}
        return fields, live & is_policy
