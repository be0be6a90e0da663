"""The four main types: Rollout, Scores, Batch, TrainState.

Shape letters, used throughout the repository:
  B episodes (group-major: row b belongs to group b // group_size)   T token positions, right-padded
  K turns of an episode   A actions of a turn   G members of a group   V vocabulary   D hidden size
x[b, t] always belongs to tokens[b, t]. The one-position shift happens only in
losses.token_logprobs and losses.token_values.
"""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Params = Any  # nested dict of arrays whose paths mirror HuggingFace parameter names


class TurnStop(enum.IntEnum):
    """Why a turn ended; NONE marks turns that were never played."""

    NONE = 0
    EOS = 1  # the policy sampled the end-of-turn token
    LENGTH = 2  # cfg.rollout.max_response was reached; the program appended the end-of-turn token
    ANSWER = 3  # the policy completed </answer> (with cfg.rollout.stop_at_answer) or a string in
    # cfg.hosts.stop


class EpisodeStop(enum.IntEnum):
    """Why an episode ended."""

    NONE = 0
    TERMINATED = 1  # the environment reached a terminal state (goal, hole, arm pulled, step limit)
    ACTION_BUDGET = 2  # max_actions_per_episode executed actions
    TURN_BUDGET = 3  # max_turns turns, or the curriculum's lower limit
    TOKEN_BUDGET = 4  # the next turn would not fit into max_tokens
    ENV_ERROR = 5  # the environment failed; excluded from loss, baselines and metrics


@struct.dataclass
class Episodes:
    """The episodes to play, group-major."""

    level: jax.Array  # int32 [E]  level of the environment's pool; equal within a group
    token_stream: jax.Array  # int32 [E]  random stream of the sampled tokens, distinct
    world_stream: jax.Array  # int32 [E]  stream of the environment; equal = common random numbers
    extra: dict[str, Any] = struct.field(default_factory=dict)  # of extensions, by name


@struct.dataclass
class Rollout:
    """Episodes as the sampler wrote them; built only in agentrl_jax.rollout."""

    tokens: jax.Array  # int32 [B, T]   prompt, answers and observations; pad_id after the end
    logprobs: jax.Array  # float32 [B, T] under the sampling distribution; 0 off action_mask
    attention_mask: jax.Array  # bool [B, T]    real tokens (a prefix of every row)
    action_mask: jax.Array  # bool [B, T]    tokens the policy sampled (these are trained)
    turn: jax.Array  # int32 [B, T]   turn of a token, including its prompt; -1 = padding
    begin: jax.Array  # int32 [B, K]   first token of a turn's observation, after the end and the
    # reward of the previous turn; 0 past the end
    part: jax.Array  # int32 [B, K]   kind of turn (text.agents); 0 = acting
    trial: jax.Array  # int32 [B, K]  attempt at the level, from 0, if an episode has several
    anchor: jax.Array  # uint32 [B, K]  hash of a turn's observation, kind and trial: equal if the
    # environment looks the same; 0 past the end
    rewards: jax.Array  # float32 [B, K] environment reward of each turn; 0 past the end
    penalties: jax.Array  # float32 [B, K] format penalty of each turn (<= 0), not in rewards
    turn_stop: jax.Array  # int32 [B, K]   TurnStop
    valid: jax.Array  # bool [B, K]    the answer parsed and every action was legal
    num_actions: jax.Array  # int32 [B, K]   environment actions executed in the turn
    actions: jax.Array  # int32 [B, K, A] executed actions, or the actions named in the text of a
    # turn that does not act; -1 = none
    num_turns: jax.Array  # int32 [B]
    episode_stop: jax.Array  # int32 [B]      EpisodeStop
    success: jax.Array  # bool [B]
    level: jax.Array  # int32 [B]      index into the environment's level pool
    allowed: jax.Array | None = None  # uint32 [B, T, W]  bits of the columns from which a token was
    # sampled (text.grammar), 0 elsewhere; None: all tokens
    branch: jax.Array | None = None  # int32 [B, K]  conversation of a turn, if an episode may have
    # several: their tokens are stored in the order of turns; None: one conversation
    figures: jax.Array | None = None  # float32 [B, F]  metrics reported by an environment on a host
    judged: jax.Array | None = None  # bool [B, K]  whether the environment on a host reported
    # validity; None: known for all turns
    staleness: jax.Array | None = None  # int32 [B, K]  number of updates between the weights that
    # sampled a turn and the weights that train on it; None: 0
    extra: dict[str, Any] = struct.field(default_factory=dict)  # [B, ...]  of extensions, by name

    @classmethod
    def empty(
        cls,
        level: Any,
        prefix: Any,
        *,
        pad_id: int,
        max_tokens: int,
        max_turns: int,
        max_actions: int,
        words: int = 0,
        xp: Any = jnp,
    ) -> 'Rollout':
        """Make episodes of levels int32 [B] that only hold the common prefix int32 [P].

        words: words per token in `allowed`; 0 = no constraint. xp: jax.numpy, or numpy for a
        rollout that a host fills in place.
        """
        rows, length = level.shape[0], prefix.shape[0]

        def tokens(fill, dtype):
            return xp.full((rows, max_tokens), fill, dtype)

        def with_prefix(x, value):
            if xp is jnp:
                return x.at[:, :length].set(value)
            x[:, :length] = value
            return x

        turns = functools.partial(xp.zeros, (rows, max_turns))
        return cls(
            tokens=with_prefix(tokens(pad_id, xp.int32), prefix[None]),
            logprobs=tokens(0.0, xp.float32),
            attention_mask=with_prefix(tokens(False, bool), True),
            action_mask=tokens(False, bool),
            turn=with_prefix(tokens(-1, xp.int32), 0),
            begin=turns(xp.int32),
            part=turns(xp.int32),
            trial=turns(xp.int32),
            anchor=turns(xp.uint32),
            rewards=turns(xp.float32),
            penalties=turns(xp.float32),
            turn_stop=turns(xp.int32),
            valid=turns(bool),
            num_actions=turns(xp.int32),
            actions=xp.full((rows, max_turns, max_actions), -1, xp.int32),
            num_turns=xp.zeros(rows, xp.int32),
            episode_stop=xp.zeros(rows, xp.int32),
            success=xp.zeros(rows, bool),
            level=level,
            allowed=xp.zeros((rows, max_tokens, words), xp.uint32) if words else None,
        )

    def put(self, at: Any, **values: Any) -> 'Rollout':
        """Return the rollout with fields set to values at an index; rows >= B are dropped."""
        written = {
            name: getattr(self, name).at[at].set(x, mode='drop') for name, x in values.items()
        }
        return self.replace(**written)

    @property
    def healthy(self) -> jax.Array:
        """bool [B]: episodes without an environment fault; losses and metrics use only these."""
        return self.episode_stop != EpisodeStop.ENV_ERROR

    @property
    def no_legal_token(self) -> jax.Array:
        """bool [B, T]: sampled tokens for which the grammar allowed no token."""
        if self.allowed is None:
            return self.action_mask & False
        return self.action_mask & (self.allowed == 0).all(-1)

    @property
    def played(self) -> jax.Array:
        """bool [B, K]: turns that were played."""
        return jnp.arange(self.rewards.shape[1])[None] < self.num_turns[:, None]

    @property
    def acts(self) -> jax.Array:
        """bool [B, K]: turns that step the environment; other turns only write text."""
        return self.part == 0

    @property
    def returns(self) -> jax.Array:
        """float32 [B]: undiscounted sum of rewards and format penalties."""
        return self.turn_returns.sum(-1)

    @property
    def turn_returns(self) -> jax.Array:
        """float32 [B, K]: reward and format penalty of each turn."""
        return self.rewards + self.penalties

    @property
    def magnitudes(self) -> 'Rollout':
        """With |rewards| and |penalties|, so that its returns bound the rounding in `returns`."""
        return self.replace(rewards=abs(self.rewards), penalties=abs(self.penalties))


@struct.dataclass
class Scores:
    """Per-token values and log-probabilities, aligned with tokens; zeros where not computed."""

    # float32 [B, T] policy before the update (the sampler's own by default)
    old_logprobs: jax.Array
    ref_logprobs: jax.Array  # float32 [B, T] reference policy
    values: jax.Array  # float32 [B, T] V of the state *before* tokens[b, t] was chosen
    next_values: jax.Array | None = None  # float32 [B, T]  V of the state after tokens[b, t]; None
    # without loss.bootstrap_truncated


@struct.dataclass
class Batch:
    """The inputs of a loss. Rows come first in every field, so it can be split and sharded."""

    tokens: jax.Array  # int32 [B, T]
    attention_mask: jax.Array  # bool [B, T]
    mask: jax.Array  # bool [B, T]    trained tokens: sampled, in a healthy and kept episode
    value_mask: jax.Array  # bool [B, T] tokens whose value is trained (turn-wise GAE: turn ends)
    turn: jax.Array  # int32 [B, T]
    old_logprobs: jax.Array  # float32 [B, T]
    ref_logprobs: jax.Array  # float32 [B, T]
    advantages: jax.Array  # float32 [B, T] 0 off the mask
    returns: jax.Array  # float32 [B, T] targets of the critic; 0 off the mask
    old_values: jax.Array  # float32 [B, T]
    allowed: jax.Array | None = None  # uint32 [B, T, W]  as Rollout.allowed
    # From extensions (rl.learning.Extra): bool [B, T] token masks, other types [B, ...]
    extra: dict[str, jax.Array] = struct.field(default_factory=dict)


@struct.dataclass
class TrainState:
    """Everything that training changes. `step` counts update_step calls (one per rollout)."""

    step: jax.Array  # int32 []
    params: Params  # policy, float32 masters
    opt_state: Any
    critic_params: Params | None  # float32 masters; None without a critic
    critic_opt_state: Any
    # int32 []  optimiser steps skipped because loss or gradient was not finite
    skipped: jax.Array
    explorer: Params | None = None  # actor, if it is not the policy itself (AgentEvol)
    extra: dict[str, Any] = struct.field(default_factory=dict)  # of extensions, by name

    @property
    def actor(self) -> Params:
        """The parameters that play."""
        return self.params if self.explorer is None else self.explorer


@struct.dataclass
class Demonstrations:
    """Episodes to imitate; `mask` marks answer tokens, including end-of-turn tokens."""

    tokens: jax.Array  # int32 [N, T]
    attention_mask: jax.Array  # bool [N, T]
    mask: jax.Array  # bool [N, T]

    @property
    def action_mask(self) -> jax.Array:
        """bool [N, T]: the mask under the name that rl.score uses."""
        return self.mask

    @property
    def allowed(self) -> None:
        """Demonstrations are never constrained by a grammar."""

    @property
    def logprobs(self) -> jax.Array:
        """float32 [N, T]: zeros, since these tokens were not sampled by a policy."""
        return jnp.zeros(self.tokens.shape, jnp.float32)


@struct.dataclass
class FrozenParams:
    """Parameters that a run reads but never changes."""

    model: Params  # base model under the adapters; {} without LoRA
    reference: Params | None  # trainable parameters at step 0; None if no loss needs them
    extra: dict[str, Any] = struct.field(default_factory=dict)  # arrays of extensions
