"""versions.jsonl: the weights that sampled each turn, where rollouts go on across updates.

A line a step: {"step": 3, "versions": [[2, 3], [3], ...]}, a list for each episode of the step's
batch, in its order, with a number for each turn: updates that the weights had seen. With it and
replies.jsonl a run repeats bit for bit, on a machine of any speed.
"""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.rollout import replies


def path_beside(log: str | Path) -> Path:
    """replies.jsonl: versions.jsonl; replies_1.jsonl: versions_1.jsonl."""
    path = Path(log)
    return path.with_name(path.name.replace('replies', 'versions', 1))


def write(path: Path, step: int, versions: np.ndarray) -> None:
    """Appends a step; versions: int32 [B, K], -1 = not sampled."""
    rows = [[int(x) for x in row if x >= 0] for row in versions]
    with open(path, 'a', encoding='utf-8') as file:
        file.write(json.dumps({'step': step, 'versions': rows}) + '\n')


def line_of(line: bytes, where: str) -> dict[str, Any]:
    """A line of the log; where: its place, for errors."""
    row = replies.object_of(line, where)
    versions = row.get('versions')
    known = isinstance(versions, list) and all(isinstance(turns, list) for turns in versions)
    if not known or not all(type(version) is int for turns in versions for version in turns):
        raise ValueError(f'{where}: no step with the versions of its turns')
    return row


class Plan:
    """The versions of a run that is played again, from step `first` on."""

    def __init__(self, path: str | Path, first: int, episodes: int):
        """episodes: of a step; streams count them from the first step of the run on."""
        self.path, self.episodes = path, episodes
        rows = replies.read_log(path, line_of)
        self.steps = {row['step']: row['versions'] for row in rows if row['step'] >= first}
        wrong = [step for step, rows in self.steps.items() if len(rows) != episodes]
        listed = [version for rows in self.steps.values() for row in rows for version in row]
        if wrong:
            raise ValueError(
                f'{path}: step {wrong[0]} has {len(self.steps[wrong[0]])} episodes, and this run '
                f'{episodes}: it was made with other settings'
            )
        if min(listed, default=first) < first:
            raise ValueError(
                f'{path}: weights from before step {first} sampled turns of later steps, so this '
                'run cannot be played again from there: begin it in an empty workdir'
            )
        self._left = collections.Counter(listed)

    def last_of(self, step: int, last: int) -> int:
        """The last step that is known, at most `last`; ValueError where one is missing before."""
        known = min(max(self.steps, default=-1), last)
        missing = [one for one in range(step, max(known, step) + 1) if one not in self.steps]
        if missing:
            raise ValueError(f'{self.path} has no line of step {missing[0]}')
        return known

    def version(self, stream: int, turn: int) -> int:
        step, row = divmod(stream, self.episodes)
        turns = self.steps[step][row]
        if turn >= len(turns):
            raise ValueError(f'{self.path}: step {step}, episode {row} has no turn {turn}')
        return turns[turn]

    def begins(self, stream: int) -> int:
        """The version of an episode's first turn; -1 where it has none."""
        step, row = divmod(stream, self.episodes)
        return next(iter(self.steps[step][row]), -1)

    def left(self, version: int) -> int:
        """Turns that these weights have to sample yet."""
        return self._left[version]

    def took(self, stream: int, turn: int, version: int) -> None:
        """A turn was sampled."""
        if self.version(stream, turn) != version:
            raise ValueError(f'{self.path}: turn {turn} of stream {stream} is not of {version}')
        self._left[version] -= 1
