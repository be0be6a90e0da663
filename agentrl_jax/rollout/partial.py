"""Rollouts that go on across updates: a step waits for its own episodes and for no others.

With rollout.staleness=s the episodes of the s next steps begin as soon as rows are free, and those
that are unfinished when a step trains stay in their slots, with their caches, and go on under the
new weights (partial rollouts: Kimi k1.5, arXiv:2501.12599; AReaL, arXiv:2505.24298).

The clock decides which weights sample a turn, and nothing else. Levels and groups of a step are
drawn as without staleness, and episodes begin in that order, so a batch never prefers short ones
and none is discarded; an episode of step t begins under the weights of step t - s or later ones.

A turn is read and sampled under the weights of one step: rows that are sampling when the last
episode of a step ends finish their answers, and prompts of which only a part was read are read
again. Caches are copied between rows that began under the same weights, and hold the common prefix
under those too. So what a turn sees is a function of its tokens and of the versions of its
episode's turns, and a run that is given those (versions.py) repeats bit for bit.
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
    """The episodes of the s + 1 steps that are in flight: row (t mod s + 1) E + b of the record is
    row b of the rollout of step t."""

    _: dataclasses.KW_ONLY
    staleness: int
    first: int  # step that it begins with
    plan: Plan | None = None  # which weights sample what; None = the clock says

    def __post_init__(self):
        super().__post_init__()
        self.opens_at = 0  # the prefix of the cache is of the first weights: it is read once more
        self.step, self.begun = self.first, self.first  # that is played; that has not begun
        self.version = np.full(self.out.part.shape, -1, np.int32)  # of each turn; -1 = none
        self.prompts: dict[int, tuple[int, np.ndarray]] = {}  # of slots that do not sample yet
        self.batch: list[int] = []  # rows of the record that are waited for
        self.finishing = False  # nothing is read: the weights are about to change

    def block(self, step: int) -> slice:
        """The rows of the record that belong to a step."""
        size = len(self.level) // (self.staleness + 1)
        at = step % (self.staleness + 1) * size
        return slice(at, at + size)

    def collect(
        self, params: Params, step: int, last: int, draw: Callable[[int], tuple]
    ) -> tuple[Rollout, np.ndarray]:
        """(the rollout of a step, versions int32 [B, K] of its turns, -1 = not sampled).

        Steps follow one another. last: the last one of the run; draw(step) -> levels and streams of
        its episodes, int32 [B] each.
        """
        self.params, self.step = params, step
        self.counted.clear()
        while self.begun <= min(step + self.staleness, last):
            self.open(self.begun, *draw(self.begun))
            self.begun += 1
        self.read_anew()
        rows = self.block(step)
        self.play_until_healthy(list(range(rows.start, rows.stop)))
        self.finish_answers()
        self.params = None  # a copy of the weights is not kept while they train
        return self.taken(step)

    def open(self, step: int, level: np.ndarray, stream: np.ndarray) -> None:
        """The episodes of a step may begin."""
        rows = self.block(step)
        self.empty(rows, level)
        self.stream[rows], self.version[rows] = stream, -1
        self.episodes.extend(range(rows.start, rows.stop))

    def read_anew(self) -> None:
        """Prompts that were not answered are read under the new weights, from their beginnings."""
        for ready in self.ready:
            ready.clear()
        for slot in self.slots:
            slot.chunks.clear()
            slot.followers.clear()
            slot.opening, slot.read = NOTHING, 0  # nobody copies what older weights have read
        waiting, self.prompts = self.prompts, {}
        for number, prompt in waiting.items():
            self.enqueue(self.slots[number], *prompt)

    def finish_answers(self) -> None:
        """Rows that are sampling end their turns."""
        self.finishing = True
        while self.is_sampling():
            self.decode()
        self.finishing = False

    def taken(self, step: int) -> tuple[Rollout, np.ndarray]:
        """What was played of a step, apart from the record."""
        rows = self.block(step)
        out, version = jax.tree.map(lambda x: x[rows].copy(), (self.out, self.version))
        stale = np.where(version < 0, 0, step - version).astype(np.int32)
        return out.replace(staleness=stale), version

    def events_of(self, step: int) -> dict[int, list]:
        """events by the rows of the step's rollout."""
        rows = self.block(step)
        return {b - rows.start: self.events[b] for b in range(rows.start, rows.stop)}

    # -- what differs

    def play(self, episodes: list[int]) -> None:
        """Plays until the given rows of the record are over; others go on meanwhile."""
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
                raise ValueError(f'step {self.step} cannot end{listed}: nothing is left to play')
            self.advance()

    def is_over(self) -> bool:
        """Whether the step's episodes are over, and what the plan has these weights sample."""
        if (self.out.episode_stop[self.batch] == EpisodeStop.NONE).any():
            return False
        return not (self.plan and self.plan.left(self.step))

    def next_episode(self) -> int:
        """The first whose first turn these weights or older ones sample.

        An episode that was lost and played again would hold its slot until then.
        """
        if not self.plan:
            return super().next_episode()
        for b in self.episodes:
            if self.plan.begins(int(self.stream[b])) <= self.step:
                self.episodes.remove(b)
                return b
        return -1

    def enqueue(self, slot: Slot, at: int, unread: np.ndarray) -> None:
        """A conversation begins with the prefix; turns of later weights wait for them."""
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
