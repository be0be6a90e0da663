"""The log of environment replies, and rollouts replayed from it without any environment.

A rollout is a function of parameters, key and replies. Every reply is therefore written to
replies.jsonl as it arrives, so that any step can be repeated bit for bit. All lines of a rollout
contain its `about`, such as step and split.
"""

import dataclasses
import itertools
import json
import math
import mmap
import operator
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl_jax.envs.hosts.world import Messages, Reply
from agentrl_jax.machine import files
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.text.conversation import action_hash

FIELDS = {  # of a line, in addition to `about`
    'stream': int,  # of the episode's tokens
    'trial': int,  # of the episode
    'turn': int,  # the turn that starts with the reply: 0 for the first observation
    'cuts': int,  # final-reward requests of the episode so far; 0 = an ordinary request
    'item': int,
    'action': int,  # hash of the policy's action, 0 for the first observation
    'observation': str,
    'messages': (dict, type(None)),  # the observation if it is messages
    'offers': list,  # forms of answers on offer
    'instruction': str,
    'reward': float,
    'done': bool,
    'success': (bool, type(None)),
    'figures': list,
    'valid': (bool, type(None)),
    'fault': str,  # why the episode failed here; '' = it did not
    'seconds': float,  # duration of the last attempt
    'tries': int,  # attempts
}
LISTED = 20  # maximum number of rollouts of a log that an error lists
About = dict[str, int | str]


class ReplyLog:
    """Appends lines to a file, if there is one. `about` describes the current rollout."""

    def __init__(self, path: str | Path | None = None):
        self.about: About = {}
        self._file = open(path, 'a', encoding='utf-8') if path else None

    def write(self, response: Response, fault: str, tries: int) -> None:
        """Append a response; fault: why the episode failed, or '' for an accepted reply."""
        if self._file:
            self._file.write(json.dumps(self.about | line_of(response, fault, tries)) + '\n')
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


class PerStepLog:
    """A log for episodes of several steps: each line has the step of its episode."""

    def __init__(self, log: ReplyLog, episodes: int):
        """episodes: number per step. Streams number the episodes of all steps of the run."""
        self.log, self.episodes = log, episodes

    def write(self, response: Response, fault: str, tries: int) -> None:
        step = response.request.stream // self.episodes
        self.log.about = {**self.log.about, 'step': step}
        self.log.write(response, fault, tries)


def line_of(response: Response, fault: str, tries: int) -> dict[str, Any]:
    request = response.request
    reply = Reply('') if fault else response.reply
    return {
        'stream': request.stream,
        'trial': request.trial,
        'turn': request.turn,
        'cuts': request.cuts,
        'item': request.item,
        'action': action_hash(request.actions[-1]) if request.actions else 0,
        'observation': str(reply.observation),
        'messages': dataclasses.asdict(reply.observation)
        if isinstance(reply.observation, Messages)
        else None,
        'offers': list(response.offers),
        'instruction': response.instruction,
        'reward': float(reply.reward),
        'done': reply.done,
        'success': reply.success,
        'figures': [float(figure) for figure in reply.figures],
        'valid': reply.valid,
        'fault': fault,
        'seconds': round(response.seconds, 6),
        'tries': tries,
    }


def read_log(path: str | Path, row_of: Callable | None = None) -> list[dict[str, Any]]:
    """Return the lines of a log without an incomplete last one; ValueError if a line is invalid.

    row_of(line, where): parses a line; None: a line of replies.
    """
    return list(rows_of(path, row_of))


def rows_of(path: str | Path, row_of: Callable | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of read_log one by one: the log of a long run may not fit in memory."""
    with files.reading(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield (row_of or _row_of)(line, f'{path}, line {number}')
            except ValueError:
                if line.endswith(b'\n'):  # only an incomplete last line has no newline
                    raise


def _row_of(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of a log with all FIELDS and a step; where: its location, for errors."""
    row = object_of(line, where)
    wrong = [
        name for name, kind in FIELDS.items() if name not in row or not isinstance(row[name], kind)
    ]
    if wrong:
        raise ValueError(f'{where}: missing or of the wrong type: {", ".join(wrong)}')
    figures = [row['reward'], row['seconds'], *row['figures']]
    if not all(isinstance(figure, float) and math.isfinite(figure) for figure in figures):
        raise ValueError(f'{where}: reward, seconds and figures must be finite numbers')
    return row


def object_of(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of a log as an object with a step."""
    try:
        text = line.decode('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{where}: not UTF-8 text (byte {error.start})') from error
    row = files.parse_json(text, where, None)
    if not isinstance(row, dict) or 'step' not in row or type(row['step']) is not int:
        raise ValueError(f'{where}: not a JSON object with an integer step')
    return row


def begun(path: str | Path, step: int) -> int:
    """Return the number of logged training episodes since `step`; 0 if the log is damaged."""
    if not Path(path).exists():
        return 0
    try:
        return len(
            {
                (row['step'], row['stream'])
                for row in rows_of(path)
                if row.get('split') == 'train' and row['step'] >= step
            }
        )
    except ValueError:  # reported by `cut`
        return 0


def newest(path: str | Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of `step` and later steps, reading a log backwards from its end.

    For logs that are still being written, which are large in a long run. [] if there is no file.
    """
    path, rows = Path(path), []
    if not path.exists() or not path.stat().st_size:
        return rows
    with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b'\n') + 1  # the rest is still being written
        while end:
            start = text.rfind(b'\n', 0, end - 1) + 1
            line = object_of(text[start:end], f'{path}, byte {start}')
            if line['step'] < step:
                break
            rows.append(line)
            end = start
    return rows[::-1]


def cut(path: str | Path, step: int, row_of: Callable | None = None) -> Path | None:
    """Drop the lines of `step` and later steps, for a run that resumes at `step`.

    A run does not need the log of past steps. A damaged log is therefore renamed, a new one is
    started, and the new name of the damaged one is returned. None: the log was intact.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        rows = rows_of(path, row_of)
        files.write_atomic(path, (json.dumps(row) + '\n' for row in rows if row['step'] < step))
    except ValueError as error:
        aside = free_name(path, 'damaged')
        path.rename(aside)
        files.warn(f'{error}: the log was renamed to {aside.name}, and a new one is started')
        return aside
    return None


def free_name(path: Path, mark: str) -> Path:
    """Return the first unused name of replies.<mark>_1.jsonl, replies.<mark>_2.jsonl, ..."""
    names = (path.with_name(f'{path.stem}.{mark}_{n}{path.suffix}') for n in itertools.count(1))
    return next(name for name in names if not name.exists())


class LoggedPool:
    """Replays the lines of a log instead of a Pool: the same replies without environments."""

    def __init__(self, lines: list[dict[str, Any]], read: Callable, path: str | Path = 'the log'):
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        self._all, self._read, self._path = lines, read, path
        # If a rollout was started twice, its later lines are the valid ones.
        where = operator.itemgetter('stream', 'trial', 'turn', 'cuts')
        self._lines = {where(line): line for line in lines}

    def of_rollout(self, about: About) -> 'LoggedPool':
        """Return the pool of one rollout; ValueError with the logged rollouts if it is missing."""
        lines = [line for line in self._all if about.items() <= line.items()]
        if not lines:
            labels = [{k: x for k, x in line.items() if k not in FIELDS} for line in self._all]
            names = sorted({', '.join(f'{k}={x}' for k, x in label.items()) for label in labels})
            listed = '; '.join(map(files.one_line_excerpt, names[:LISTED])) or 'none'
            description = ', '.join(f'{name}={x}' for name, x in about.items())
            raise ValueError(
                f'{self._path} has no rollout with {description}; it has {len(names)}: {listed}'
            )
        return LoggedPool(lines, self._read, self._path)

    def another(self) -> 'LoggedPool':
        """Return a pool for training steps, as Pool.another."""
        return self.of_rollout({'split': 'train'})

    def submit(self, request: Request) -> None:
        where = request.stream, request.trial, request.turn, request.cuts
        if where not in self._lines:
            raise ValueError(
                f'the log has no reply for turn {request.turn} of stream {request.stream}'
            )
        line = self._lines[where]
        action = action_hash(request.actions[-1]) if request.actions else 0
        if (line['item'], line['action']) != (request.item, action):
            raise ValueError(
                f'turn {request.turn} of stream {request.stream} differs from the log, which was '
                'recorded with other parameters, another key or other settings'
            )
        if line['fault']:
            self.done.put(Response(request, fault=line['fault']))
            return
        reply = Reply(**{field.name: line[field.name] for field in dataclasses.fields(Reply)})
        reply = dataclasses.replace(reply, figures=tuple(line['figures']))
        if line['messages'] is not None:
            reply = dataclasses.replace(reply, observation=Messages(**line['messages']))
        prompt = self._read(reply.observation, line['instruction'])
        response = Response(request, reply, line['instruction'], prompt, tuple(line['offers']))
        self.done.put(dataclasses.replace(response, seconds=line['seconds']))

    def abandon(self, slot: int) -> None:
        pass

    def close(self) -> None:
        pass
