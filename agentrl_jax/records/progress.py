"""A progress bar on a terminal, plain lines elsewhere; a live line on a terminal, else nothing."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import jax
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

PLAIN_LINES = 20  # lines of a whole job where no bar can be drawn
Watch = Callable[[], Mapping[str, Any] | None]  # figures of this moment, None = nothing to say


class LiveLine:
    """What a watch says, drawn anew several times a second by a thread of the terminal's."""

    def __init__(self, label: str, watch: Watch):
        self._label, self._watch = label, watch

    def __rich__(self) -> RenderableType:
        shown = self._watch()
        text = '' if shown is None else f'{self._label}  {_pairs(shown)}'
        return Text(text, no_wrap=True, overflow='ellipsis')


@contextlib.contextmanager
def live_line(label: str, watch: Watch, *, stream: TextIO | None = None) -> Iterator[None]:
    """A live line by itself, gone in the end; on a terminal of process 0 only."""
    console = Console(file=_stream(stream))
    if not _draws(console):
        yield
        return
    with Live(LiveLine(label, watch), console=console, refresh_per_second=4, transient=True):
        yield


class Bar(RichProgress):
    """A bar with a live line below it."""

    line: LiveLine | None = None

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.line is not None:
            yield self.line


class Progress:
    """with Progress(total, label) as progress: progress.advance(1, success=0.5)

    `done` steps count as finished before it starts (a resumed run). Only process 0 shows anything.
    """

    def __init__(self, total: int, label: str, *, done: int = 0, stream: TextIO | None = None):
        self._total, self._label, self._done = total, label, done
        self._stream = _stream(stream)
        self._begun_with = done
        self._start = time.monotonic()
        console = Console(file=self._stream)
        self._bar = None
        if _draws(console):
            columns = (
                TextColumn('{task.description}', markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn('{task.fields[shown]}', markup=False),
            )
            self._bar = Bar(*columns, console=console)
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
        text = _pairs(shown)
        if self._bar:
            self._bar.update(self._task, completed=self._done, shown=text)
            return
        mark = max(self._total / PLAIN_LINES, 1)
        first, last = before == self._begun_with, self._done >= self._total
        if first or last or int(before / mark) != int(self._done / mark):
            elapsed = time.monotonic() - self._start
            line = f'{self._label} {self._done}/{self._total}  {elapsed:.0f} s  {text}'
            print(line.rstrip(), file=self._stream, flush=True)

    def watch(self, label: str, watch: Watch) -> None:
        """A live line below the bar, where there is a bar."""
        if self._bar:
            self._bar.line = LiveLine(label, watch)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


def _stream(stream: TextIO | None) -> TextIO:
    return stream or (sys.stderr if jax.process_index() == 0 else io.StringIO())


def _draws(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _pairs(shown: Mapping[str, Any]) -> str:
    return '  '.join(f'{name} {_short(value)}' for name, value in shown.items())


def _short(value: Any) -> str:
    if isinstance(value, (str, int)):
        return str(value)
    return f'{float(value):.3g}'
