"""The state of a run of a sweep, read only from the files in its folder.

run.json       the definition of the run; written for all runs before the first one starts
lock           locked (flock) while the training process lives; contains its holder
attempts.json  one entry per start; 'outcome' is null if the sweep died before the run ended
output.txt     the output of training
metrics.jsonl, finished.json   written by training (run_log)
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
TAIL_BYTES = 1 << 18  # of metrics.jsonl: a few hundred rows


class Attempt(TypedDict):
    """An entry of attempts.json, without fields that are never read."""

    started: float
    outcome: str | None  # 'done', 'failed' or 'preempted'


ATTEMPTS = TypeAdapter(list[Attempt])
Overrides = dict[str, Any]  # dotted fields of a config


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str  # of its folder: readable overrides and a hash of the resolved config
    overrides: Overrides  # fields set by the sweep, as stored in the config
    config: dict[str, Any]  # the resolved config as plain JSON values
    steps: int


@dataclasses.dataclass(frozen=True)
class Status:
    name: str
    state: str  # one of STATES
    attempts: int = 0  # starts so far
    done_steps: int = 0
    steps: int = 0
    success: float | None = None  # held-out if measured, else of the last rollout
    left_s: float | None = None


def under_existing_names(runs: Sequence[Run], workdir: Path) -> list[Run]:
    """Rename runs after the folder in `workdir` with the same hash, if it exists.

    Names depend on the other runs of the sweep, and on the version that created the folder.
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
    """Lock a run and return the descriptor, to be inherited by its child; None if it is locked.

    A run that is being trained without a sweep counts as locked. The kernel releases the lock when
    all processes with the descriptor have ended, even after kill -9. The file is never removed: a
    second file of that name would be a second lock.
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
        text = 'this file system does not support locks (flock); use another workdir'
        raise OSError(error.errno, text, str(folder)) from error
    os.close(descriptor)
    return None


def is_locked(folder: Path) -> bool:
    """Whether a process is training this run."""
    descriptor = claim(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def sign(descriptor: int, **holder: Any) -> None:
    """Write the holder of a lock into its file; the caller must hold it."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode() + b'\n', 0)


def orphan_holder(folder: Path) -> dict[str, Any] | None:
    """The lock's holder if the run is training here but its sweep has died; else None."""
    if not is_locked(folder):
        return None
    path = folder / LOCK_FILE
    text = files.read_text(path)
    if not text.endswith('\n'):  # sign() is writing it
        return None
    holder = files.parse_json(text, str(path))
    if not isinstance(holder, dict) or not {'host', 'sweep', 'slot'} <= holder.keys():
        raise ValueError(f'{path} does not name the process that is training')
    gone = holder['host'] == socket.gethostname() and not _is_alive(holder['sweep'])
    return holder if gone else None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    path = folder / ATTEMPTS_FILE
    attempts = files.read_json(path) if path.exists() else []
    try:
        ATTEMPTS.validate_python(attempts, strict=True)
    except ValidationError as error:
        text = f'{path}: expected a list of attempts; remove the file to count again from 0'
        raise ValueError(text) from error
    return attempts


def begin_attempt(folder: Path) -> int:
    """Record a start and return the number of attempts so far; the caller must hold the lock."""
    attempts = [*read_attempts(folder), {'started': time.time(), 'code': None, 'outcome': None}]
    _write_attempts(folder, attempts)
    return len(attempts)


def end_attempt(folder: Path, code: int, outcome: str, seconds: float) -> None:
    """Record the end and duration of the newest attempt; the caller must hold the lock."""
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
    """The state of a run. It has failed after more than `before` + `retries` failures."""
    attempts = read_attempts(folder)
    failures = sum(attempt['outcome'] == 'failed' for attempt in attempts)
    if is_done(run, folder):
        state = 'done'
    elif locked:
        state = 'running'
    elif failures - before > retries:
        state = 'failed'
    elif attempts and attempts[-1]['outcome'] != 'failed':
        state = 'preempted'  # interrupted, or killed together with its sweep
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
        raise ValueError(f'{path} is not a regular file')
    with path.open('rb') as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL_BYTES, 0))
        lines = file.read().split(b'\n')
    cut = 1 if size > TAIL_BYTES else 0  # the first line is incomplete
    complete = lines[cut:-1]  # text after the last newline is still being written
    try:
        return [run_log.parse_row(line) for line in complete if line.strip()]
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
