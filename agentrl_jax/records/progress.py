"""A progress bar on a terminal, plain lines elsewhere."""

import io
import sys
import time
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_LINES = 20  # lines of a whole job where no bar can be drawn


class Progress:
    """with Progress(total, label) as progress: progress.advance(1, success=0.5)

    `done` steps count as finished before it starts (a resumed run). Only process 0 shows anything.
    """

    def __init__(self, total: int, label: str, *, done: int = 0, stream: TextIO | None = None):
        self._total, self._label, self._done = total, label, done
        self._stream = stream or (sys.stderr if jax.process_index() == 0 else io.StringIO())
        self._begun_with = done
        self._start = time.monotonic()
        console = Console(file=self._stream)
        self._bar = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (
                TextColumn('{task.description}', markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn('{task.fields[shown]}', markup=False),
            )
            self._bar = RichProgress(*columns, console=console)
            self._task = self._bar.add_task(label, total=total, completed=done, shown='')

    def __enter__(self) -> 'Progress':
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, steps: int = 1, **shown: Any) -> None:
        """Counts steps as done and shows the given values behind the bar."""
        before, self._done = self._done, self._done + steps
        text = '  '.join(f'{name} {_short(value)}' for name, value in shown.items())
        if self._bar:
            self._bar.update(self._task, completed=self._done, shown=text)
            return
        mark = max(self._total / PLAIN_LINES, 1)
        first, last = before == self._begun_with, self._done >= self._total
        if first or last or int(before / mark) != int(self._done / mark):
            elapsed = time.monotonic() - self._start
            line = f'{self._label} {self._done}/{self._total}  {elapsed:.0f} s  {text}'
            print(line.rstrip(), file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


def _short(value: Any) -> str:
    if isinstance(value, (str, int)):
        return str(value)
    return f'{float(value):.3g}'
