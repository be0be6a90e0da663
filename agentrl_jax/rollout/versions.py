"""versions.jsonl: the weights that sampled each turn of rollouts that span updates.

There is one line per step, such as {"step": 3, "versions": [[2, 3], [3], ...]}: a list per episode
of the batch, in batch order, and a number per turn, the number of updates before its weights.
Together with replies.jsonl, it makes a run repeatable bit for bit on a machine of any speed.
"""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.rollout import replies


def versions_path(log: str | Path) -> Path:
    """Return versions.jsonl for replies.jsonl, versions_1.jsonl for replies_1.jsonl."""
    path = Path(log)
    return path.with_name(path.name.replace('replies', 'versions', 1))


def write(path: Path, step: int, versions: np.ndarray) -> None:
    """Append a step; versions: int32 [B, K], -1 = not sampled."""
    rows = [[int(x) for x in row if x >= 0] for row in versions]
    with open(path, 'a', encoding='utf-8') as file:
        file.write(json.dumps({'step': step, 'versions': rows}) + '\n')


def line_of(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of the log; where: its location, for errors."""
    row = replies.object_of(line, where)
    versions = row.get('versions')
    known = isinstance(versions, list) and all(isinstance(turns, list) for turns in versions)
    if not known or not all(type(version) is int for turns in versions for version in turns):
        raise ValueError(f'{where}: not a step with one list of integer versions per episode')
    return row


class Plan:
    """The recorded versions of a run, for a replay that starts at step `first`."""

    def __init__(self, path: str | Path, first: int, episodes: int):
        """episodes: number per step. Streams number the episodes of all steps of the run."""
        self.path, self.episodes = path, episodes
        rows = replies.read_log(path, line_of)
        self.steps = {row['step']: row['versions'] for row in rows if row['step'] >= first}
        wrong = [step for step, rows in self.steps.items() if len(rows) != episodes]
        listed = [version for rows in self.steps.values() for row in rows for version in row]
        if wrong:
            raise ValueError(
                f'{path}: step {wrong[0]} has {len(self.steps[wrong[0]])} episodes, this run '
                f'has {episodes}: the log was recorded with other settings'
            )
        if min(listed, default=first) < first:
            raise ValueError(
                f'{path}: weights from before step {first} sampled turns of later steps, so this '
                'run cannot be replayed from there: start it in an empty workdir'
            )
        self._left = collections.Counter(listed)

    def last_of(self, step: int, last: int) -> int:
        """Return the last recorded step up to `last`; ValueError if a step before it is missing."""
        known = min(max(self.steps, default=-1), last)
        missing = [one for one in range(step, max(known, step) + 1) if one not in self.steps]
        if missing:
            raise ValueError(f'{self.path} has no line for step {missing[0]}')
        return known

    def version(self, stream: int, turn: int) -> int:
        step, row = divmod(stream, self.episodes)
        turns = self.steps[step][row]
        if turn >= len(turns):
            raise ValueError(f'{self.path}: step {step}, episode {row} has no turn {turn}')
        return turns[turn]

    def begins(self, stream: int) -> int:
        """Return the version of an episode's first turn; -1 if it has no turns."""
        step, row = divmod(stream, self.episodes)
        return next(iter(self.steps[step][row]), -1)

    def left(self, version: int) -> int:
        """Return the number of turns that these weights have yet to sample."""
        return self._left[version]

    def took(self, stream: int, turn: int, version: int) -> None:
        """Record that a turn was sampled."""
        if self.version(stream, turn) != version:
            raise ValueError(f'{self.path}: turn {turn}, stream {stream}: not of version {version}')
        self._left[version] -= 1
