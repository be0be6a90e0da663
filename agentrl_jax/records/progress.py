"""Progress of a job: a bar with live lines on a terminal, a few plain lines elsewhere."""

import contextlib
import io
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from agentrl_jax.machine import files, processes
from agentrl_jax.records.run_log import COMPILED_FILE, NOW_FILE

PLAIN_LINES = 20  # lines of a job without a bar
LONG_S = 2.0  # shorter compilations are not reported
BEACON_S = 5.0  # seconds between writes, which are expensive if the workdir is a bucket
PROGRAMS = {  # compiled functions that take long -> their purpose
    'collect': 'the rollout',
    'decode': 'the sampling of tokens',
    'learn': 'the update',
    'make_state': 'the training state',
    'measure_rollout': 'the rollout metrics',
    'play_turn': 'random play',
    'read': 'the prefill of observations',
    'rescore': 'the scoring of rollouts',
    'start': 'the prefill of prompts',
    'step': 'the behaviour cloning step',
}
Watch = Callable[[], Mapping[str, Any] | None]  # current figures, None = no line


def _line(label: str, watch: Watch) -> Text:
    """The current figures of a watch; the terminal's thread calls this several times a second."""
    figures = watch()
    text = '' if figures is None else f'{label}  {_pairs(figures)}'
    return Text(text, no_wrap=True, overflow='ellipsis')


class Compiling(processes.CompileCounter):
    """Reports each program that XLA compiles for LONG_S or more, and its compile time.

    A timer reports it, because the compiling thread is blocked until it is done. workdir: where to
    keep the times for the next start; None: nowhere.
    """

    def __init__(
        self, say: Callable[[str], None], *, workdir: Path | None = None, long_s: float = LONG_S
    ):
        super().__init__()
        self._say, self._long_s = say, long_s
        self._file = workdir and workdir / COMPILED_FILE
        self._last = read_times(self._file) if self._file else {}
        self.phase = ''  # suffix of the program's title: 'of validation'

    def now(self) -> dict[str, str] | None:
        """The program and its seconds so far, for a live line; None if it is quick."""
        name, seconds = self.running()
        return {self._title(name): f'{seconds:.0f} s'} if seconds >= self._long_s else None

    def _title(self, name: str) -> str:
        title = PROGRAMS.get(name, f'the program {name.strip("<>")}')
        return f'{title} {self.phase}'.rstrip()

    def begun(self, name: str) -> None:
        self._timer = threading.Timer(self._long_s, self._report, [self._title(name)])
        self._timer.daemon = True
        self._timer.start()

    def _report(self, title: str) -> None:
        last = f' ({self._last[title]:.0f} s last time)' if title in self._last else ''
        self._say(f'compiling {title}{last}')

    def done(self, name: str, seconds: float) -> None:
        self._timer.cancel()
        if seconds >= self._long_s:
            title = self._title(name)
            self._say(f'compiled {title}: {seconds:.0f} s')
            self._last[title] = round(seconds, 1)
            with contextlib.suppress(OSError):  # such as a full disk
                if self._file:
                    files.write_atomic(self._file, json.dumps(self._last) + '\n')


def read_times(path: Path) -> dict[str, float]:
    """Return the compile times of the last start; {} if none can be read."""
    try:
        return {title: float(seconds) for title, seconds in files.read_json(path).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@contextlib.contextmanager
def beacon(
    workdir: Path, now: Callable[[], Mapping[str, Any]], *, every_s: float = BEACON_S
) -> Iterator[None]:
    """Write now() to now.json when it changes, in a thread of process 0; delete it at the end."""
    path, stop = workdir / NOW_FILE, threading.Event()

    def write() -> None:
        written = ''
        while not stop.is_set():
            text = json.dumps(now(), default=str) + '\n'
            if text != written:
                with contextlib.suppress(OSError):  # a full disk: try again
                    files.write_atomic(path, text)
                    written = text
            stop.wait(every_s)

    if jax.process_index():
        yield
        return
    thread = threading.Thread(target=write, name='beacon', daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(OSError):  # the workdir may be gone
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def live_line(label: str, watch: Watch) -> Iterator[None]:
    """A live line without a bar, removed at the end; only on a terminal of process 0."""
    console = Console(stderr=True)
    if jax.process_index() or not _draws(console):
        yield
        return
    options = {'console': console, 'refresh_per_second': 4, 'transient': True}
    with Live(get_renderable=lambda: _line(label, watch), **options):
        yield


class Bar(RichProgress):
    """A bar with live lines below it."""

    watches: Mapping[str, Watch] = {}

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield from filter(None, (_line(*watch) for watch in list(self.watches.items())))


class Progress(contextlib.ExitStack):
    """with Progress(total, label) as progress: progress.advance(1, success=0.5)

    done: steps finished before the start, of a resumed run. workdir: keeps compile times for the
    next start. Only process 0 prints.
    """

    def __init__(
        self,
        total: int,
        label: str,
        *,
        done: int = 0,
        workdir: Path | None = None,
        stream: TextIO | None = None,
    ):
        super().__init__()
        self._total, self._label, self._first, self._done = total, label, done, done
        self._stream = stream or (sys.stderr if jax.process_index() == 0 else io.StringIO())
        self._watches: dict[str, Watch] = {}
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
            self._bar.watches = self._watches
            self._task = self._bar.add_task(label, total=total, completed=done, shown='')
        workdir = None if jax.process_index() else workdir
        self._compiling = Compiling(self._say_program, workdir=workdir)
        self.watch('compiling', self._compiling.now)

    def __enter__(self) -> 'Progress':
        self.enter_context(self._compiling)
        if self._bar:
            self.enter_context(self._bar)
        return self

    def _say_program(self, text: str) -> None:
        if not self._bar or text.startswith('compiled '):  # a live line shows current compilations
            self.say(text)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase in reports of compilations: 'of validation'."""
        self._compiling.phase = name
        try:
            yield
        finally:
            self._compiling.phase = ''

    def advance(self, steps: int = 1, **shown: Any) -> None:
        """Count steps as done and show values after the bar."""
        before, self._done = self._done, self._done + steps
        text = _pairs(shown)
        if self._bar:
            self._bar.update(self._task, completed=self._done, shown=text)
            return
        mark = max(self._total / PLAIN_LINES, 1)
        first, last = before == self._first, self._done >= self._total
        if first or last or int(before / mark) != int(self._done / mark):
            elapsed = time.monotonic() - self._start
            line = f'{self._label} {self._done}/{self._total}  {elapsed:.0f} s  {text}'
            print(line.rstrip(), file=self._stream, flush=True)

    def watch(self, label: str, watch: Watch) -> None:
        """Add a live line below the bar, if there is one, and its figures to now()."""
        self._watches[label] = watch

    def now(self) -> dict[str, Any]:
        """The job, its steps, and the figures of the watches."""
        figures = {name: value for name, watch in self._watches.items() if (value := watch())}
        return {'job': self._label, 'done': self._done, 'total': self._total, **figures}

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


def _draws(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _pairs(figures: Mapping[str, Any]) -> str:
    return '  '.join(
        f'{name} {value}' if isinstance(value, (str, int)) else f'{name} {float(value):.3g}'
        for name, value in figures.items()
    )


def duration(seconds: float) -> str:
    """'40 s', '12 min', '3 h 05 min'; '?' if it is not finite."""
    if not math.isfinite(seconds):
        return '?'
    if seconds < 60:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    return f'{minutes} min' if minutes < 60 else f'{minutes // 60} h {minutes % 60:02d} min'
