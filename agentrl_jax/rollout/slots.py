"""State, settings and slot schedule of a device rollout, and how a token is sampled."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.machine import sharding
from agentrl_jax.models.base import Model
from agentrl_jax.rollout import rows as token_rows
from agentrl_jax.rollout import windows
from agentrl_jax.rollout.sampling import Sampler
from agentrl_jax.text import answer as answers
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text import task as text
from agentrl_jax.types import Episodes, Params, Rollout

IDLE, GENERATING, WAITING = range(3)
COUNTERS = ('decodes', 'serves', 'generated', 'reads', 'read', 'overflow')  # fields of Slots


@struct.dataclass
class Slots:
    """State of S slots, and the record of N episodes so far."""

    rows: token_rows.Rows  # S rows of tokens
    episode: jax.Array  # int32 [S]     row of `out` being played; N = none
    phase: jax.Array  # int32 [S]     IDLE, GENERATING, WAITING
    response: jax.Array  # int32 [S]     tokens sampled in the current turn
    answer: answers.AnswerState  # parser of the current turn, S rows
    world: text.Episode  # environments, S rows
    next_episode: jax.Array  # int32 []
    out: Rollout  # N rows
    decodes: jax.Array  # int32 []      decode iterations
    serves: jax.Array  # int32 []      serve iterations
    reads: jax.Array  # int32 []      blocks read
    read: jax.Array  # int32 []      tokens in them
    generated: jax.Array  # int32 []      tokens sampled
    overflow: jax.Array  # int32 []      observations longer than their block (must stay 0)
    place: grammars.GrammarState | None = None
    # state of the answer grammar, S rows; None without one
    schedule: Any = None  # state of the Schedule, if it has one


@struct.dataclass
class Turns:
    """The next turns of w slots."""

    episode: jax.Array  # int32 [w]  row of Slots.out; N = none
    world: text.Episode  # w environments
    length: jax.Array  # int32 [w]  tokens of the episode so far
    sampled_end: jax.Array  # bool [w]  the policy ended the previous turn with an end token
    tokens: jax.Array | None = None  # int32 [w, width]  prompt to read; pad_id after the end
    count: jax.Array | None = None  # int32 [w]  tokens of the prompt; above width if some were lost


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Assigns the listed episodes to free slots in order; each slot reads its own prompts.

    A subclass may play other episodes, or let a slot copy a prompt from another slot.
    """

    def listed(self, episodes: Episodes) -> Episodes:
        """Return the rows to play."""
        return episodes

    def start(
        self, task: text.TextTask, episodes: Episodes, rows: token_rows.Rows, world: text.Episode
    ) -> Any:
        """Return the initial state of the schedule; world: of S slots."""
        del task, episodes, rows, world

    def served(self, slots: Slots, count: int) -> jax.Array:
        """Return up to `count` slots to serve, int32 [count]; S = none."""
        none = slots.phase.shape[0]
        (waiting,) = jnp.nonzero(slots.phase == WAITING, size=count, fill_value=none)
        return waiting

    def waiting(self, slots: Slots) -> jax.Array:
        """Return the number of slots that `served` could serve, int32 []."""
        return jnp.sum(slots.phase == WAITING)

    def order(self, slots: Slots, number: jax.Array) -> jax.Array:
        """Map positions in the list to episodes, int32 [w]; N or more: none."""
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
        """Assign the next episodes of the list to slots `which` int32 [w] if their episode is over.

        over bool [w]. turns: the next turns in the slots' current episodes.
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
        self, slots: Slots, task: text.TextTask, which: jax.Array, turns: Turns
    ) -> tuple[Slots, jax.Array]:
        """Assign their turns, with prompts, to slots `which` int32 [w].

        Returns (slots, follows bool [w]: slots that do not read their prompt, because `after_read`
        copies it).
        """
        del task
        changed = turns.episode != slots.episode[which]
        episode = slots.episode.at[which].set(turns.episode, mode='drop')
        return slots.replace(episode=episode), jnp.zeros_like(changed)

    def after_read(self, slots: Slots, task: text.TextTask, which: jax.Array) -> Slots:
        """Update the slots after slots `which` int32 [w] have read their prompts."""
        del task, which
        return slots

    def finish(self, slots: Slots, episodes: Episodes) -> Rollout:
        """Return the finished rollout of E episodes."""
        del episodes
        return slots.out


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """All static settings of a rollout, as a single static argument of jit."""

    player: token_rows.Player
    slots: int  # episodes played at once
    serve_rows: int  # maximum number of waiting slots served together
    max_tokens: int  # tokens of an episode, including prompts
    max_response: int  # sampled tokens of a turn
    sampler: Sampler = Sampler()
    window: int = 0  # turns in the context, including the current one; 0 = the full conversation
    stop_at_answer: bool = False  # a turn ends at </answer>
    schedule: Schedule = Schedule()
    vocab_shards: int = 1  # of logits over the full vocabulary, see sampling.sample

    @property
    def model(self) -> Model:
        return self.player.model

    def of_shard(self, mesh: jax.sharding.Mesh) -> 'RolloutSettings':
        """Return the settings of one shard of the rows; `slots` is the number of the full mesh."""
        slots = self.slots // sharding.row_shards(mesh)
        rows, tensor = min(self.serve_rows, slots), mesh.shape['tensor']
        return dataclasses.replace(self, slots=slots, serve_rows=rows, vocab_shards=tensor)

    def context(self, task: Any) -> windows.Context:
        """Return the window of the policy in episodes of a task."""
        return windows.Context.of(task, self.window, self.max_response)


def sample(
    state: Any,
    params: Params,
    grammar: grammars.Grammar | None,
    key: jax.Array,
    *,
    settings: RolloutSettings,
    head: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return (token int32 [S], log-probability float32 [S], allowed bits uint32 [S, W]) of rows.

    The token of stream e at position t is drawn with fold_in(fold_in(key, e), t), so the schedule,
    the row and the mesh do not change which tokens an episode gets. state: Slots or programs.State.
    head: see Player.answer_head. Without a grammar the bits are None.
    """
    vocab_shards, bits = settings.vocab_shards if head is None else 1, None
    draw = functools.partial(settings.sampler.draw, state, vocab_shards=vocab_shards)
    if grammar is not None:
        legal = grammars.allowed(grammar, state.place)
        draw, bits = grammars.constrain(draw, grammar, legal), grammars.pack(legal)
    logits = settings.player.logits(state.rows, params, head)

    def uniform(stream, position):
        row_key = jax.random.fold_in(key, stream)
        return jax.random.uniform(jax.random.fold_in(row_key, position))

    return *draw(logits, jax.vmap(uniform)(state.rows.stream, state.rows.length)), bits


def empty_rollout(task: text.TextTask, level: jax.Array, max_tokens: int) -> Rollout:
    """Return episodes of levels int32 [B] that only hold the task's prefix."""
    return Rollout.empty(
        level,
        task.prefix,
        pad_id=task.pad_id,
        max_tokens=max_tokens,
        max_turns=task.max_turns,
        max_actions=task.max_actions_per_turn,
        words=text.words(task),
    )


def choose(which: jax.Array, new: Any, old: Any) -> Any:
    """Select rows of arrays [w, ...]: `new` where which bool [w] is true, otherwise `old`."""

    def one(new, old):
        return jnp.where(which.reshape(which.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)
