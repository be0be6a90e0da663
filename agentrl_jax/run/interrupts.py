"""Signals from the first import on: a command that resumes ends at once, to be started again.

Imported before everything else, so it imports little itself.
"""

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

EXIT_STOPPED, EXIT_KILLED = 75, 130  # as processes.EXIT_PREEMPTED; as a shell says of Ctrl-C
RESUMES = 'the same command resumes'
BEGINS = 'the same command begins anew'
LAST: list[Callable[[], None]] = []  # done before a second Ctrl-C ends the process
NOTICES: list[Callable[[], str]] = []  # the last one answers the first signal of a training
_listens = threading.Event()


def stop_when_asked() -> None:
    """SIGTERM or Ctrl-C outside of training ends the process at once with EXIT_STOPPED.

    What was saved is not lost. A thread listens, since Python's own handlers wait while a program
    runs or compiles. Training has handlers of its own (processes.Preemption): then the thread
    answers the first signal, and only a second Ctrl-C ends the process here.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    threading.Thread(target=_listen, args=(reader,), daemon=True).start()
    _listens.set()


def listens() -> bool:
    """Whether the thread of stop_when_asked reports signals."""
    return _listens.is_set()


@contextlib.contextmanager
def answering(notice: Callable[[], str]) -> Iterator[None]:
    """Within it the first signal prints `notice()` at once."""
    NOTICES.append(notice)
    try:
        yield
    finally:
        NOTICES.remove(notice)


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """The handler outside of training: the thread has received it already."""


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
            _leave('interrupted twice: what was not saved is lost', EXIT_KILLED)
        if NOTICES and not answered:
            answered = True
            os.write(2, f'\n{NOTICES[-1]()}\n'.encode())


def what_is_left(argv: Sequence[str]) -> str:
    """What the same command will do, by the names of the checkpoints of a training's workdir."""
    words = [word.removeprefix('-').removeprefix('-') for word in argv]
    given = [word.partition('=')[2] for word in words if word.startswith('workdir=')]
    given += [after for word, after in zip(words, argv[1:], strict=False) if word == 'workdir']
    if os.path.basename(argv[0]) != 'train.py' or not given or '://' in given[-1]:
        return 'the same command goes on from what was saved'
    folder = os.path.join(os.path.expanduser(given[-1]), 'checkpoints')
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(name.isdigit() for name in names):
        return f'step {max(int(name) for name in names if name.isdigit())} is saved, and {RESUMES}'
    return f'nothing is saved yet, and {BEGINS}'


def _leave(sentence: str, code: int) -> NoReturn:
    print(f'\n{sentence}', file=sys.stderr, flush=True)
    os._exit(code)
