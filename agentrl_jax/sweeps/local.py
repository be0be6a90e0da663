"""Runs of a sweep as child processes on this machine: claim, start, watch, retry.

Several sweeps may work on one folder, and any of them may be killed at any moment. A sweep starts a
run only while it holds the run's lock. The training process inherits the lock. If its sweep dies,
the orphan keeps running, and other sweeps check the run again once it has ended.
"""

import dataclasses
import math
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.machine import processes
from agentrl_jax.run import command, interrupts
from agentrl_jax.sweeps import status as sweep_status
from agentrl_jax.sweeps.status import Run, Status

POLL_S = 0.2  # between checks of the children
REFRESH_S = 2.0  # between checks of all files
PROGRAMS_FOLDER = 'programs'  # compiled programs of all runs, in the workdir
LAST_LINES, LAST_BYTES = 8, 4000  # of a failure's output
STOP_CODES = (processes.EXIT_PREEMPTED, -signal.SIGTERM)  # -SIGTERM: before its handler is set


@dataclasses.dataclass
class Child:
    """A training process and the lock it shares with this one."""

    run: Run
    folder: Path
    slot: int
    process: subprocess.Popen
    lock: int
    attempt: int
    log_start: int  # start of its output in output.txt
    began: float  # by the monotonic clock


@dataclasses.dataclass
class Plan:
    """A local sweep and its state in memory; nothing of it is saved."""

    runs: Sequence[Run]
    workdir: Path
    command: Callable[[Run], Sequence[str]]
    slots: Sequence[Mapping[str, str]]  # environment variables of each of the parallel runs
    retries: int = 2  # failures of a run after which it is tried again
    children: list[Child] = dataclasses.field(default_factory=list, init=False)
    statuses: dict[str, Status] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self):
        """Count earlier failures of each run: every sweep has its own retries."""
        self.before = {
            run.name: sweep_status.count_failures(self.workdir / run.name) for run in self.runs
        }

    def open_runs(self) -> list[Status]:
        return [s for s in self.statuses.values() if s.state not in ('done', 'failed')]

    def ask_to_stop(self) -> None:
        """Send SIGTERM: training finishes its step, saves and exits with 75."""
        for child in self.children:
            child.process.terminate()


def train_all(
    plan: Plan, board: Any, *, poll_s: float = POLL_S, refresh_s: float = REFRESH_S
) -> int:
    """Train until every run is done or has failed; return 0, 1 (failures) or 75 (interrupted).

    board: show(statuses) and say(text), see board.py.
    """
    last = plan.ask_to_stop  # each child has its own session
    interrupts.LAST.append(last)
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal, without nohup
        signals.append(signal.SIGHUP)
    with processes.Preemption(tuple(signals), last) as stop:
        stop.phase = 'the running steps'
        try:
            watch(plan, board, stop, poll_s, refresh_s)
        finally:  # a sweep that fails stops its children too
            plan.ask_to_stop()
            interrupts.LAST.remove(last)
    if plan.open_runs():
        return processes.EXIT_PREEMPTED
    return int(any(status.state == 'failed' for status in plan.statuses.values()))


def watch(plan: Plan, board: Any, stop: Any, poll_s: float, refresh_s: float) -> None:
    """Start and monitor runs until none is open, or until all children have stopped."""
    last_look, stopping = -math.inf, False
    while True:
        exits = [child for child in plan.children if child.process.poll() is not None]
        for child in exits:
            if message := finish(child, plan):
                board.say(message)
            plan.children.remove(child)
        if stop.requested and not stopping:
            board.say(f'stopping: {len(plan.children)} runs are saving')
            plan.ask_to_stop()
            stopping = True
        if exits or time.monotonic() - last_look >= refresh_s:
            if not stopping:
                fill(plan)
            look(plan)
            board.show([plan.statuses[run.name] for run in plan.runs])
            last_look = time.monotonic()
        if not plan.children and (stopping or not plan.open_runs()):
            return
        time.sleep(poll_s)


def _unfinished(plan: Plan) -> list[Run]:
    """Runs that are not known to be done. A run that is done stays done."""
    done = {name for name, status in plan.statuses.items() if status.state == 'done'}
    return [run for run in plan.runs if run.name not in done]


def look(plan: Plan) -> None:
    """Update the statuses."""
    children = {child.run.name for child in plan.children}
    for run in _unfinished(plan):
        folder = plan.workdir / run.name
        plan.statuses[run.name] = sweep_status.status(
            run,
            folder,
            locked=run.name in children or sweep_status.is_locked(folder),
            retries=plan.retries,
            before=plan.before[run.name],
        )


def fill(plan: Plan) -> None:
    """Start runs in the free slots, those with the fewest attempts first."""
    if len(plan.children) == len(plan.slots):
        return
    children = {child.run.name for child in plan.children}
    waiting = [run for run in _unfinished(plan) if run.name not in children]
    waiting.sort(key=lambda run: len(sweep_status.read_attempts(plan.workdir / run.name)))
    # An orphan still uses the memory and the GPUs of its slot.
    orphans = [sweep_status.orphan_holder(plan.workdir / run.name) for run in waiting]
    free = set(range(len(plan.slots))) - {child.slot for child in plan.children}
    free -= {holder['slot'] for holder in orphans if holder}
    for run in waiting:
        if not free:
            return
        if child := claim_and_start(run, plan, min(free)):
            plan.children.append(child)
            free.remove(child.slot)


def claim_and_start(run: Run, plan: Plan, slot: int) -> Child | None:
    """Start a run unless another process trains it, or it is done or has failed."""
    folder = plan.workdir / run.name
    lock = sweep_status.claim(folder)
    if lock is None:
        return None
    # Read files after the claim: another sweep may have just finished the run.
    exhausted = sweep_status.count_failures(folder) - plan.before[run.name] > plan.retries
    if exhausted or sweep_status.is_done(run, folder):
        os.close(lock)
        return None
    holder = {'host': socket.gethostname(), 'sweep': os.getpid(), 'slot': slot}
    sweep_status.sign(lock, **holder)
    attempt, words = sweep_status.begin_attempt(folder), list(plan.command(run))
    with (folder / sweep_status.OUTPUT_FILE).open('ab') as log:
        log.write(f'--- attempt {attempt}: {shlex.join(words)}\n'.encode())
        log.flush()
        log_start = log.tell()
        # A new session: only the sweep receives Ctrl-C, and it lets its children save.
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Each process of srun -n8 may be a sweep, but a run is always one process.
            env={
                processes.COUNT: '1',
                # Shares compiled programs between runs. By default, jax caches only slow compiles.
                command.PROGRAMS: str((plan.workdir / PROGRAMS_FOLDER).absolute()),
                'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
                **os.environ,
                **plan.slots[slot],
            },
            pass_fds=(lock,),
            start_new_session=True,
        )
    sweep_status.sign(lock, **holder, process=process.pid)
    return Child(run, folder, slot, process, lock, attempt, log_start, time.monotonic())


def finish(child: Child, plan: Plan) -> str:
    """Record the end of a child and release its run; return a report if it failed, else ''."""
    code, name = child.process.returncode, child.run.name
    # Files on disk take precedence over the exit code.
    outcome = 'preempted' if code in STOP_CODES else 'failed'
    if sweep_status.is_done(child.run, child.folder):
        outcome = 'done'
    sweep_status.end_attempt(child.folder, code, outcome, time.monotonic() - child.began)
    failures = sweep_status.count_failures(child.folder) - plan.before[name]
    os.close(child.lock)
    if outcome != 'failed':
        return ''
    left = plan.retries + 1 - failures
    what = f'exit code {code}' if code else 'it ended without finishing'
    then = f'{left} more attempts' if left > 0 else 'given up'
    log = child.folder / sweep_status.OUTPUT_FILE
    with log.open('rb') as file:
        file.seek(max(child.log_start, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = file.read().decode(errors='replace').splitlines()[-LAST_LINES:]
    end = ''.join(f'\n    {line}' for line in lines)
    return f'{name} failed at attempt {child.attempt} ({what}), {then}. End of {log}:{end}'
