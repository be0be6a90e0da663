"""The state of a run of a sweep, read from the files in its folder and from nothing else.

run.json       what the run is; written for all runs before the first one starts
lock           locked (flock) as long as the training process lives, whoever started it; names who
attempts.json  one entry for each start; 'outcome' is null when the sweep did not see the end
output.txt     what training printed
metrics.jsonl, finished.json   written by training itself (run_log)
"""

import dataclasses
import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from agentrl_jax.machine import files, lock
from agentrl_jax.records import run_log

RUN_FILE, LOCK_FILE, ATTEMPTS_FILE, OUTPUT_FILE = 'run.json', 'lock', 'attempts.json', 'output.txt'
STATES = ('running', 'failed', 'preempted', 'waiting', 'done')  # in the order of the table
TAIL_BYTES = 1 << 18  # of metrics.jsonl: some hundred rows


class Attempt(TypedDict):
    """An entry of attempts.json, without what a sweep only writes."""

    started: float
    outcome: str | None  # 'done', 'failed' or 'preempted'


ATTEMPTS = TypeAdapter(list[Attempt])
Overrides = dict[str, Any]  # dotted fields of a config


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str  # of its folder: readable overrides and a hash of the resolved config
    overrides: Overrides  # what the sweep sets, as the config holds it
    config: dict[str, Any]  # the resolved config as plain JSON values
    steps: int


@dataclasses.dataclass(frozen=True)
class Status:
    name: str
    state: str  # one of STATES
    attempts: int = 0  # starts so far
    done_steps: int = 0
    steps: int = 0
    success: float | None = None  # held out where measured, else of the last rollout
    left_s: float | None = None


def under_existing_names(runs: Sequence[Run], workdir: Path) -> list[Run]:
    """The runs, each named after the folder in `workdir` that has its hash, if there is one.

    A name depends on what the other runs of the sweep set, and on the version that made the folder.
    """
    folders = {path.parent.name for path in workdir.glob(f'*/{RUN_FILE}')}
    by_hash = {name.rpartition('-')[2]: name for name in sorted(folders)}
    return [
        run
        if run.name in folders
        else dataclasses.replace(run, name=by_hash.get(run.name.rpartition('-')[2], run.name))
        for run in runs
    ]


def claim(folder: Path) -> int | None:
    """A descriptor that holds the run's lock, to be handed to its child; None: it is taken.

    Taken too is what somebody trains without a sweep. The kernel frees the lock when every process
    that has the descriptor is gone, kill -9 included. The file is never removed: a second file of
    that name would be a second lock.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not lock.is_held(folder):
            return descriptor
    except BlockingIOError:
        pass
    except OSError as error:
        os.close(descriptor)
        text = 'this file system cannot lock files (flock); name another workdir'
        raise OSError(error.errno, text, str(folder)) from error
    os.close(descriptor)
    return None


def is_locked(folder: Path) -> bool:
    """Whether some process trains this run now."""
    descriptor = claim(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def sign(descriptor: int, **holder: Any) -> None:
    """Writes into a lock that is held who holds it."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode() + b'\n', 0)


def orphan(folder: Path) -> dict[str, Any] | None:
    """Who trains this run on this machine though the sweep that started it is gone; else None."""
    if not is_locked(folder):
        return None
    path = folder / LOCK_FILE
    text = files.read_text(path)
    if not text.endswith('\n'):  # just being signed
        return None
    holder = files.parse_json(text, str(path))
    if not isinstance(holder, dict) or not {'host', 'sweep', 'slot'} <= holder.keys():
        raise ValueError(f'{path} does not say who trains here')
    gone = holder['host'] == socket.gethostname() and not _is_alive(holder['sweep'])
    return holder if gone else None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    path = folder / ATTEMPTS_FILE
    found = files.read_json(path) if path.exists() else []
    try:
        ATTEMPTS.validate_python(found, strict=True)
    except ValidationError as error:
        text = f'{path}: a list of attempts is expected; remove it to count anew'
        raise ValueError(text) from error
    return found


def begin_attempt(folder: Path) -> int:
    """Notes a start, the lock being held; the number of attempts, this one included."""
    attempts = [*read_attempts(folder), {'started': time.time(), 'code': None, 'outcome': None}]
    _write_attempts(folder, attempts)
    return len(attempts)


def end_attempt(folder: Path, code: int, outcome: str, seconds: float) -> None:
    """Notes how the newest attempt ended, and after how long, the lock being held."""
    *before, last = read_attempts(folder)
    last |= {'code': code, 'outcome': outcome, 'seconds': seconds}
    _write_attempts(folder, [*before, last])


def _write_attempts(folder: Path, attempts: list[dict]) -> None:
    files.write_atomic(folder / ATTEMPTS_FILE, json.dumps(attempts, indent=1) + '\n')


def count_failures(folder: Path) -> int:
    return sum(attempt['outcome'] == 'failed' for attempt in read_attempts(folder))


def is_done(run: Run, folder: Path) -> bool:
    return run_log.finished_step(folder) == run.steps


def status(run: Run, folder: Path, *, locked: bool, retries: int, before: int = 0) -> Status:
    """The state of a run; failed after more than `retries` failures beyond those `before`."""
    attempts = read_attempts(folder)
    failures = sum(attempt['outcome'] == 'failed' for attempt in attempts)
    if is_done(run, folder):
        state = 'done'
    elif locked:
        state = 'running'
    elif failures - before > retries:
        state = 'failed'
    elif attempts and attempts[-1]['outcome'] != 'failed':
        state = 'preempted'  # asked to stop, or killed together with its sweep
    else:
        state = 'waiting'
    rows = tail(folder / run_log.METRICS_FILE) if attempts or locked or state == 'done' else []
    done, success, left_s = progress(rows, run.steps)
    return Status(
        run.name,
        state,
        len(attempts),
        done,
        run.steps,
        success,
        left_s if state == 'running' else None,
    )


def tail(path: Path) -> list[dict[str, Any]]:
    """The complete rows in the last TAIL_BYTES of a metrics.jsonl; [] without the file."""
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f'{path} is no regular file')
    with path.open('rb') as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL_BYTES, 0))
        lines = file.read().split(b'\n')
    cut = 1 if size > TAIL_BYTES else 0  # the first line is but the end of one
    whole = lines[cut:-1]  # what follows the last newline is still being written
    try:
        return [run_log.parse_row(line) for line in whole if line.strip()]
    except ValueError as error:
        raise ValueError(f'{path}: a row near its end: {error}') from error


def progress(rows: list[dict[str, Any]], steps: int) -> tuple[int, float | None, float | None]:
    """(steps done, success, seconds left) from rows of metrics, oldest first.

    Row k < steps is written when step k is done; row `steps` holds the last validation.
    """
    if not rows:
        return 0, None, None
    done = min(rows[-1]['step'] + 1, steps)
    rates = [r['eval/success'] for r in rows if 'eval/success' in r]
    rates = rates or [r['rollout/success'] for r in rows if 'rollout/success' in r]
    first, last = rows[0], rows[-1]
    left_s = None
    if last['step'] > first['step']:
        pace = (last['time_s'] - first['time_s']) / (last['step'] - first['step'])
        left_s = pace * (steps - done)
    return done, float(rates[-1]) if rates else None, left_s
