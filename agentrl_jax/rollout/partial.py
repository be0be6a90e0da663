"""Rollouts that span updates: a step waits only for its own episodes.

With rollout.staleness=s, episodes of the next s steps start as soon as rows are free. Unfinished
episodes stay in their slots with their caches while a step trains, and continue under the new
weights (partial rollouts: Kimi k1.5, arXiv:2501.12599; AReaL, arXiv:2505.24298).

Timing only decides which weights sample a turn. Levels and groups of a step are drawn as without
staleness and start in that order, so batches do not favour short episodes and no episode is
discarded. An episode of step t starts under the weights of step t - s or later.

Each turn is read and sampled under the weights of a single step. Rows that are sampling when the
last episode of a step ends finish their answers, and partly read prompts are read again. Caches are
only copied between rows that started under the same weights, which also computed their common
prefix. The cache of a turn therefore depends only on its tokens and on the weight versions of its
episode's turns, and a run with recorded versions (versions.py) can be repeated bit for bit.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from agentrl_jax.rollout.host_rollout import HostRollout
from agentrl_jax.rollout.host_slots import NOTHING, Slot
from agentrl_jax.rollout.versions import Plan
from agentrl_jax.types import EpisodeStop, Params, Rollout


@dataclasses.dataclass(eq=False)
class PartialRollout(HostRollout):
    """Episodes of the s + 1 steps in flight; row b of step t is row (t mod (s + 1)) E + b of the
    record, with E episodes per step."""

    _: dataclasses.KW_ONLY
    staleness: int
    first: int  # first step
    plan: Plan | None = None  # which weights sample each turn; None = decided by timing

    def __post_init__(self):
        super().__post_init__()
        self.opens_at = 0  # read the prefix again: the cached one is from the first weights
        self.step, self.begun = self.first, self.first  # current step; first step not started
        self.version = np.full(self.out.part.shape, -1, np.int32)  # of each turn; -1 = none
        self.prompts: dict[int, tuple[int, np.ndarray]] = {}  # unanswered prompts by slot
        self.rows: list[int] = []  # rows of a step that this process plays
        self.batch: list[int] = []  # rows of the record to wait for
        self.finishing = False  # the weights are about to change, so do not read prompts

    def block(self, step: int) -> slice:
        """Return the rows of the record that belong to a step."""
        size = len(self.level) // (self.staleness + 1)
        at = step % (self.staleness + 1) * size
        return slice(at, at + size)

    def own_rows(self, step: int) -> list[int]:
        """Return the rows of the record that belong to a step and to this process."""
        return [self.block(step).start + row for row in self.rows]

    def collect(
        self, params: Params, step: int, last: int, draw: Callable[[int], tuple]
    ) -> tuple[Rollout, np.ndarray]:
        """Return (the rollout of a step, versions int32 [B, K] of its turns, -1 = not sampled).

        Call with consecutive steps. last: the last step of the run. draw(step) -> levels and
        streams of the step's episodes, int32 [B] each, and the rows that this process plays.
        """
        self.params, self.step = params, step
        self.counted.clear()
        while self.begun <= min(step + self.staleness, last):
            self.open(self.begun, *draw(self.begun))
            self.begun += 1
        self.reread_pending()
        self.play_until_healthy(self.own_rows(step))
        self.finish_answers()
        self.params = None  # free the actor's copy of the weights during the update
        return self.taken(step)

    def open(self, step: int, level: np.ndarray, stream: np.ndarray, rows: list[int]) -> None:
        """Add the episodes of a step to the list."""
        block, self.rows = self.block(step), rows
        self.empty(block, level)
        self.stream[block], self.version[block] = stream, -1
        self.episodes.extend(self.own_rows(step))

    def reread_pending(self) -> None:
        """Read all unanswered prompts again, from their start and under the new weights."""
        for ready in self.ready:
            ready.clear()
        for slot in self.slots:
            slot.chunks.clear()
            slot.followers.clear()
            slot.opening, slot.read = NOTHING, 0  # do not copy caches of older weights
        waiting, self.prompts = self.prompts, {}
        for number, prompt in waiting.items():
            self.enqueue(self.slots[number], *prompt)

    def finish_answers(self) -> None:
        """Let the sampling rows finish their turns."""
        self.finishing = True
        while self.is_sampling():
            self.decode()
        self.finishing = False

    def taken(self, step: int) -> tuple[Rollout, np.ndarray]:
        """Return a copy of a step's rows, and their versions."""
        rows = self.block(step)
        out, version = jax.tree.map(lambda x: x[rows].copy(), (self.out, self.version))
        stale = np.where(version < 0, 0, step - version).astype(np.int32)
        return out.replace(staleness=stale), version

    def events_of(self, step: int) -> dict[int, list]:
        """Return the events of a step by row of its rollout."""
        start = self.block(step).start
        return {row: self.events[start + row] for row in self.rows}

    # -- overrides

    def play(self, episodes: list[int]) -> None:
        """Play until the given rows of the record are over, and other rows in the meantime."""
        self.batch = episodes
        playing = {slot.episode for slot in self.slots} | set(self.episodes)
        over = self.out.episode_stop[episodes] != EpisodeStop.NONE
        again = [b for b, ended in zip(episodes, over, strict=True) if not ended | (b in playing)]
        self.version[again] = -1
        self.episodes.extendleft(reversed(again))
        self.seat()
        while not self.is_over():
            if super().is_over():
                listed = f' with the weights in {self.plan.path}' if self.plan else ''
                raise ValueError(f'step {self.step} cannot finish{listed}: no turn is left to play')
            self.advance()

    def is_over(self) -> bool:
        """Return whether the step's episodes, and the plan's turns for these weights, are over."""
        if (self.out.episode_stop[self.batch] == EpisodeStop.NONE).any():
            return False
        return not (self.plan and self.plan.left(self.step))

    def next_episode(self) -> int:
        """Take the first episode with a first turn sampled by these weights or older ones.

        Otherwise a replayed faulty episode would occupy its slot until the weights of its turn.
        """
        if not self.plan:
            return super().next_episode()
        for b in self.episodes:
            if self.plan.begins(int(self.stream[b])) <= self.step:
                self.episodes.remove(b)
                return b
        return -1

    def enqueue(self, slot: Slot, at: int, unread: np.ndarray) -> None:
        """Prepend the prefix to new conversations, and delay turns that need later weights."""
        if at == len(self.task.prefix):
            at, unread = 0, np.concatenate([self.task.prefix, unread])
        self.prompts[slot.number] = at, unread
        stream = int(self.stream[slot.episode])
        if self.finishing or (self.plan and self.plan.version(stream, slot.turn) > self.step):
            return
        self.version[slot.episode, slot.turn] = self.step
        super().enqueue(slot, at, unread)

    def on_answer(self, slot: Slot, line: np.ndarray) -> None:
        del self.prompts[slot.number]
        if self.plan:
            self.plan.took(int(self.stream[slot.episode]), slot.turn, self.step)
        super().on_answer(slot, line)
