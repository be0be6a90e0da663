"""The log of what worlds said, and rollouts played again from it, without any world.

A rollout is a function of parameters, key and replies. So every reply is a line of replies.jsonl,
written when it arrives, and a step that was lost or is asked about can be repeated bit for bit. The
lines of a rollout share what `about` says of it, such as its step and split.
"""

import dataclasses
import itertools
import json
import math
import mmap
import operator
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentrl_jax.envs.hosts.world import Messages, Reply
from agentrl_jax.machine import files
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.text.conversation import action_hash

FIELDS = {  # of a line, beside those of `about`
    'stream': int,  # of the episode's tokens
    'trial': int,  # of the episode
    'turn': int,  # of the episode that the reply opens: 0 for the first observation
    'cuts': int,  # times that the turn's requests were refused for their length; 0 = it was asked
    'item': int,
    'action': int,  # hash of what the policy said before, 0 at the beginning
    'observation': str,
    'messages': (dict, type(None)),  # the observation, where it is messages
    'offers': list,  # forms of answers on offer
    'instruction': str,
    'reward': float,
    'done': bool,
    'success': (bool, type(None)),
    'figures': list,
    'valid': (bool, type(None)),
    'fault': str,  # why the episode ended here; '' = it did not
    'seconds': float,  # the world took, the last time that it was asked
    'tries': int,  # times that it was asked
}
# Of lines older than these fields
ADDED = {'tries': 1, 'figures': [], 'valid': None, 'messages': None, 'offers': [], 'cuts': 0}
LISTED = 20  # rollouts of a log that an error spells out
About = dict[str, int | str]


class ReplyLog:
    """Appends lines to a file, if there is one; `about` is of the rollout that is being played."""

    def __init__(self, path: str | Path | None = None):
        self.about: About = {}
        self._file = open(path, 'a', encoding='utf-8') if path else None

    def write(self, response: Response, fault: str, tries: int) -> None:
        """fault: '' for a reply that was taken, or why the episode ended."""
        if self._file:
            self._file.write(json.dumps(self.about | line_of(response, fault, tries)) + '\n')
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


class LogOfSteps:
    """A log of episodes of several steps: each line has the step of its own episode."""

    def __init__(self, log: ReplyLog, episodes: int):
        """episodes: of a step; streams count them from the first step of the run on."""
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
    """The lines of a log; a last one that was cut off is left out, any other fault is an error.

    row_of(line, where): a line as an object, that of replies unless another is given.
    """
    return list(rows_of(path, row_of))


def rows_of(path: str | Path, row_of: Callable | None = None) -> Iterator[dict[str, Any]]:
    """read_log line by line: the log of a long run is larger than memory."""
    with files.reading(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield (row_of or _row_of)(line, f'{path}, line {number}')
            except ValueError:
                if line.endswith(b'\n'):  # only a last line lacks it
                    raise


def _row_of(line: bytes, where: str) -> dict[str, Any]:
    """A line of a log with all FIELDS and a step; where: its place, for errors."""
    row = object_of(line, where)
    row = {'trial': 0} | ADDED | row  # older logs had one trial
    wrong = [
        name for name, kind in FIELDS.items() if name not in row or not isinstance(row[name], kind)
    ]
    if wrong:
        raise ValueError(f'{where}: {", ".join(wrong)} is no part of a reply')
    figures = [row['reward'], row['seconds'], *row['figures']]
    if not all(isinstance(figure, float) and math.isfinite(figure) for figure in figures):
        raise ValueError(f'{where}: a reward, a figure or a time that is no finite number')
    return row


def object_of(line: bytes, where: str) -> dict[str, Any]:
    """A line of a log as an object that says its step."""
    try:
        text = line.decode('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{where}: no UTF-8 text (byte {error.start})') from error
    row = files.parse_json(text, where, None)
    if not isinstance(row, dict) or 'step' not in row or type(row['step']) is not int:
        raise ValueError(f'{where}: no object with a step')
    return row


def begun(path: str | Path, step: int) -> int:
    """Training episodes of `step` and later ones that a log has heard of; 0 where it is damaged."""
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
    except ValueError:  # cut says so
        return 0


def newest(path: str | Path, step: int) -> list[dict[str, Any]]:
    """The lines of `step` and later ones at the end of a log, which is not read any further back.

    For a log that is being written, which is large in a long run. [] where there is no file.
    """
    path, found = Path(path), []
    if not path.exists() or not path.stat().st_size:
        return found
    with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b'\n') + 1  # the rest is being written
        while end:
            start = text.rfind(b'\n', 0, end - 1) + 1
            line = object_of(text[start:end], f'{path}, byte {start}')
            if line['step'] < step:
                break
            found.append(line)
            end = start
    return found[::-1]


def cut(path: str | Path, step: int, row_of: Callable | None = None) -> Path | None:
    """Leaves the lines of the steps before `step`, for a run that goes on from there.

    No run needs what its log says of steps that are over. A damaged log therefore gets another
    name, which is returned, and a new one begins; None: nothing was wrong with it.
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
        print(
            f'WARNING: {error}: the log is kept as {aside.name}, and a new one begins',
            file=sys.stderr,
            flush=True,
        )
        return aside
    return None


def free_name(path: Path, mark: str) -> Path:
    """replies.<mark>_1.jsonl, or the first number that no file has."""
    names = (path.with_name(f'{path.stem}.{mark}_{n}{path.suffix}') for n in itertools.count(1))
    return next(name for name in names if not name.exists())


class LoggedPool:
    """The lines of a log in the place of a Pool: the same replies, and no world."""

    def __init__(self, lines: list[dict[str, Any]], read: Callable, path: str | Path = 'the log'):
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        self._all, self._read, self._path = lines, read, path
        # Of a rollout that was begun twice the later lines are those that counted.
        where = operator.itemgetter('stream', 'trial', 'turn', 'cuts')
        self._lines = {where(line): line for line in lines}

    def of_rollout(self, about: About) -> 'LoggedPool':
        """What answers one rollout; without it a ValueError that names the rollouts there are."""
        lines = [line for line in self._all if about.items() <= line.items()]
        if not lines:
            labels = [{k: x for k, x in line.items() if k not in FIELDS} for line in self._all]
            names = sorted({', '.join(f'{k}={x}' for k, x in label.items()) for label in labels})
            listed = '; '.join(map(files.in_line, names[:LISTED])) or 'none'
            wanted = ', '.join(f'{name}={x}' for name, x in about.items())
            raise ValueError(
                f'{self._path} holds no rollout of {wanted}; there are {len(names)}: {listed}'
            )
        return LoggedPool(lines, self._read, self._path)

    def another(self) -> 'LoggedPool':
        """As Pool.another."""
        return self.of_rollout({'split': 'train'})

    def submit(self, request: Request) -> None:
        where = request.stream, request.trial, request.turn, request.cuts
        if where not in self._lines:
            raise ValueError(
                f'the log ends before turn {request.turn} of the episode of stream {request.stream}'
            )
        line = self._lines[where]
        said = action_hash(request.actions[-1]) if request.actions else 0
        if (line['item'], line['action']) != (request.item, said):
            raise ValueError(
                f'turn {request.turn} of the episode of stream {request.stream} is not what the '
                'log answers: it was made by other parameters, another key or other settings'
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
