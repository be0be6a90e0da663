"""The state of a rollout on the device, its settings, and the schedule of its slots."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.models.base import Model
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout import windows
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.sampling import Sampler
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import task as text
from agentrl_jax.types import Rollout

IDLE, GENERATING, WAITING = range(3)


@struct.dataclass
class Slots:
    """State of the S slots, and what is written so far of N episodes."""

    rows: token_rows.Rows  # S rows of tokens
    episode: jax.Array  # int32 [S]     row of `out` being played; N = none
    phase: jax.Array  # int32 [S]     IDLE, GENERATING, WAITING
    response: jax.Array  # int32 [S]     tokens sampled in the current turn
    answer: answers.AnswerState  # parser of the current turn, S rows
    world: text.Episode  # worlds, S rows
    next_episode: jax.Array  # int32 []
    out: Rollout  # N rows
    decodes: jax.Array  # int32 []      decode iterations
    serves: jax.Array  # int32 []      serve iterations
    reads: jax.Array  # int32 []      blocks read
    read: jax.Array  # int32 []      tokens in them
    generated: jax.Array  # int32 []      tokens sampled
    overflow: jax.Array  # int32 []      observations longer than their block (must stay 0)
    place: grammars.Place | None = None  # in the grammar of answers, S rows; None without one
    schedule: Any = None  # state of the Schedule; None: it has none


@struct.dataclass
class Turns:
    """What w slots play next."""

    episode: jax.Array  # int32 [w]  row of Slots.out; N = none
    world: text.Episode  # w worlds
    length: jax.Array  # int32 [w]  tokens of the episode so far
    sampled_end: jax.Array  # bool [w]  the policy ended the turn before with an end token


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Free slots take the listed episodes in order, and each slot reads its own prompts.

    A subclass may play other episodes, and have a prompt read by another slot.
    """

    def listed(self, episodes: Episodes) -> Episodes:
        """The rows to play."""
        return episodes

    def start(
        self, task: text.TextTask, episodes: Episodes, rows: token_rows.Rows, world: text.Episode
    ) -> Any:
        """The state of the schedule before anything is played; world: of S slots."""
        del task, episodes, rows, world

    def served(self, slots: Slots, count: int) -> jax.Array:
        """Up to `count` slots that get their next turn, int32 [count]; S = none."""
        none = slots.phase.shape[0]
        (waiting,) = jnp.nonzero(slots.phase == WAITING, size=count, fill_value=none)
        return waiting

    def waiting(self, slots: Slots) -> jax.Array:
        """Number of slots that `served` could serve; int32 []."""
        return jnp.sum(slots.phase == WAITING)

    def order(self, slots: Slots, number: jax.Array) -> jax.Array:
        """The episode that is played as the given one of the list, int32 [w]; N or more: none."""
        del slots
        return number

    def next_turns(
        self,
        slots: Slots,
        task: text.TextTask,
        episodes: Episodes,
        which: jax.Array,
        over: jax.Array,
        turns: Turns,
    ) -> tuple[Slots, Turns]:
        """Give the next episodes of the list to the slots `which` int32 [w] whose episode is over.

        over bool [w]; turns: the slots' next turns in the episodes that they have.
        """
        num_episodes, none = episodes.level.shape[0], slots.out.tokens.shape[0]
        wants = over & (which < slots.phase.shape[0])
        candidate = slots.next_episode + jnp.cumsum(wants) - 1
        starts = wants & (candidate < num_episodes)
        candidate = self.order(slots, candidate)
        episode = jnp.where(starts, candidate, jnp.where(over, none, slots.episode[which]))
        level = slots.out.level[jnp.minimum(candidate, num_episodes - 1)]
        fresh = jax.vmap(text.begin, in_axes=(None, 0))(task, level)
        world = choose(starts, fresh, turns.world)
        length = jnp.where(starts, task.prefix.shape[0], slots.rows.length[which])
        slots = slots.replace(next_episode=slots.next_episode + starts.sum())
        return slots, turns.replace(episode=episode, world=world, length=length)

    def seat(
        self,
        slots: Slots,
        task: text.TextTask,
        which: jax.Array,
        turns: Turns,
        prompt: tuple[jax.Array, jax.Array],
    ) -> tuple[Slots, jax.Array]:
        """Let slots `which` int32 [w] play their turns.

        prompt: what each is to read, (tokens int32 [w, width], count int32 [w]). Returns (slots,
        follows bool [w]: slots whose prompt is not read, since `after_read` copies it).
        """
        del task, prompt
        changed = turns.episode != slots.episode[which]
        episode = slots.episode.at[which].set(turns.episode, mode='drop')
        return slots.replace(episode=episode), jnp.zeros_like(changed)

    def after_read(self, slots: Slots, task: text.TextTask, which: jax.Array) -> Slots:
        """Called once the slots `which` int32 [w] have read their prompts."""
        del task, which
        return slots

    def finish(self, slots: Slots, episodes: Episodes) -> Rollout:
        """The rollout of E episodes when all has been played."""
        del episodes
        return slots.out


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """All that a rollout depends on beside arrays: one static argument of jit."""

    player: token_rows.Player
    slots: int  # episodes played at once
    serve_rows: int  # waiting slots that are served together
    max_tokens: int  # tokens of an episode, prompts included
    max_response: int  # sampled tokens of a turn
    sampler: Sampler = Sampler()
    window: int = 0  # turns that the policy sees, this one included; 0 = the whole conversation
    stop_at_answer: bool = False  # a turn ends at </answer>
    schedule: Schedule = Schedule()
    vocab_shards: int = 1  # of logits over the whole vocabulary, see sampling.sample

    @property
    def model(self) -> Model:
        return self.player.model

    def context(self, task: Any) -> windows.Context:
        """What the policy sees of the episodes of a task."""
        return windows.Context.of(task, self.window, self.max_response)


def choose(which: jax.Array, new: Any, old: Any) -> Any:
    """Trees of arrays [w, ...]: the new one's where which bool [w], elsewhere the old one's."""

    def one(new, old):
        return jnp.where(which.reshape(which.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)
