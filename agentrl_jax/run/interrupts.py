"""Signal handling from the first import on: a command that can be resumed ends at once.

This module is imported before everything else, so it imports little itself.
"""

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

EXIT_STOPPED, EXIT_KILLED = 75, 130  # processes.EXIT_PREEMPTED; the shell's code for Ctrl-C
RESUMES = 'the same command resumes'
STARTS_OVER = 'the same command starts over'
LAST: list[Callable[[], None]] = []  # called before a second Ctrl-C ends the process
NOTICES: list[Callable[[], str]] = []  # the last one answers a training run's first signal
_listens = threading.Event()


def exit_on_signals() -> None:
    """Make SIGTERM or Ctrl-C outside of training end the process at once with EXIT_STOPPED.

    A thread waits for signals, since Python's handlers are delayed while a program runs or
    compiles. Training installs its own handlers (processes.Preemption). Then the thread answers the
    first signal, and only a second Ctrl-C ends the process here.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    threading.Thread(target=_listen, args=(reader,), daemon=True).start()
    _listens.set()


def listens() -> bool:
    """Return whether the thread of exit_on_signals reports signals."""
    return _listens.is_set()


@contextlib.contextmanager
def answering(notice: Callable[[], str]) -> Iterator[None]:
    """Print `notice()` immediately at the first signal within this context."""
    NOTICES.append(notice)
    try:
        yield
    finally:
        NOTICES.remove(notice)


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Do nothing: outside of training, the thread has already received the signal."""


def _listen(reader: int) -> None:
    interrupts, answered = 0, False
    while number := os.read(reader, 1):
        interrupts += number[0] == signal.SIGINT
        if signal.getsignal(number[0]) is _ignore:
            word = signal.Signals(number[0]).name
            _leave(f'{word}: stopped; {what_is_left(sys.argv)}', EXIT_STOPPED)
        if interrupts > 1:
            for do in LAST:
                do()
            _leave('interrupted twice; unsaved progress is lost', EXIT_KILLED)
        if NOTICES and not answered:
            answered = True
            os.write(2, f'\n{NOTICES[-1]()}\n'.encode())


def what_is_left(argv: Sequence[str]) -> str:
    """Describe what rerunning the command will do, based on the workdir's checkpoint names."""
    words = [word.removeprefix('-').removeprefix('-') for word in argv]
    workdirs = [word.partition('=')[2] for word in words if word.startswith('workdir=')]
    workdirs += [after for word, after in zip(words, argv[1:], strict=False) if word == 'workdir']
    if os.path.basename(argv[0]) != 'train.py' or not workdirs or '://' in workdirs[-1]:
        return 'the same command resumes from what was saved'
    folder = os.path.join(os.path.expanduser(workdirs[-1]), 'checkpoints')
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(name.isdigit() for name in names):
        return f'step {max(int(name) for name in names if name.isdigit())} is saved, and {RESUMES}'
    return f'nothing is saved yet, and {STARTS_OVER}'


def _leave(sentence: str, code: int) -> NoReturn:
    print(f'\n{sentence}', file=sys.stderr, flush=True)
    os._exit(code)
