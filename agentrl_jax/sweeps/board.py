"""Terminal output of a sweep: a live table on a terminal, plain lines elsewhere."""

import collections
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl_jax.records.progress import duration
from agentrl_jax.sweeps.status import STATES, Status

PLAIN_EVERY_S = 60.0  # between plain lines about running runs
STYLES = {'running': 'cyan', 'failed': 'red', 'preempted': 'yellow', 'done': 'green'}


class Board:
    """with Board() as board: board.show(statuses); board.say(text)"""

    def __init__(self, stream: TextIO | None = None, *, plain_every_s: float = PLAIN_EVERY_S):
        self._stream = stream or sys.stderr
        self._every_s = plain_every_s
        self._states: dict[str, str] = {}
        self._spoke = time.monotonic()
        console = Console(file=self._stream)
        self._live = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> 'Board':
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._live:
            self._live.stop()

    def show(self, statuses: Sequence[Status]) -> None:
        """Display all runs. Plain output has only changes and, at intervals, running runs."""
        if self._live:
            self._live.update(table(statuses), refresh=True)
            return
        due = time.monotonic() - self._spoke >= self._every_s
        changes = [s for s in statuses if self._states.setdefault(s.name, 'waiting') != s.state]
        self._states |= {status.name: status.state for status in statuses}
        rows = changes + [s for s in statuses if due and s.state == 'running' and s not in changes]
        for status in rows:
            print('  '.join(cells(status)).rstrip(), file=self._stream, flush=True)
        if rows:
            print(counts(statuses), file=self._stream, flush=True)
            self._spoke = time.monotonic()

    def say(self, text: str) -> None:
        """Print lines above the table."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


def table(statuses: Sequence[Status]) -> Table:
    """Table of runs: running, then failed and preempted, then the rest."""
    grid = Table(title=counts(statuses), title_justify='left', box=None, pad_edge=False)
    for heading in ('run', 'state', 'step', 'success', 'left'):
        grid.add_column(heading, justify='left' if heading in ('run', 'state') else 'right')
    for status in sorted(statuses, key=lambda status: STATES.index(status.state)):
        style = STYLES[status.state] if status.state in STYLES else None
        name, state, *rest = cells(status)
        grid.add_row(name, state, *rest, style=style)
    return grid


def counts(statuses: Sequence[Status]) -> str:
    """'15 runs: 2 running, 9 waiting, 4 done'."""
    tally = collections.Counter(status.state for status in statuses)
    parts = ', '.join(f'{tally[state]} {state}' for state in STATES if tally[state])
    return f'{len(statuses)} runs: {parts}'


def cells(status: Status) -> tuple[str, str, str, str, str]:
    """Run, state, step, success and time left as text."""
    state = status.state
    if state == 'failed':
        state += f' ({status.attempts} attempts)'
    elif state == 'running' and status.attempts > 1:
        state += f' (attempt {status.attempts})'
    success = '' if status.success is None else f'{100 * status.success:.1f} %'
    left = '' if status.left_s is None else duration(status.left_s)
    return status.name, state, f'{status.done_steps}/{status.steps}', success, left
