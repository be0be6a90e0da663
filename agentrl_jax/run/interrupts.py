"""Signals from the first import on: a command that resumes ends at once, to be started again.

Imported before everything else, so it imports little itself.
"""

import os
import signal
import sys
import threading
import types
from typing import NoReturn

EXIT_STOPPED, EXIT_KILLED = 75, 130  # as processes.EXIT_PREEMPTED; as a shell says of Ctrl-C


def stop_when_asked() -> None:
    """SIGTERM or Ctrl-C outside of training ends the process at once with EXIT_STOPPED.

    Nothing is lost then that was saved. A thread listens, for Python's own handlers wait as long as
    a program compiles. While training listens itself (processes.Preemption), only a second Ctrl-C
    ends the process here.
    """
    heard, said = os.pipe()
    os.set_blocking(said, False)
    signal.set_wakeup_fd(said, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _noted)
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()


def _noted(number: int, frame: types.FrameType | None) -> None:
    """The handler outside of training: the thread has heard it already."""


def _listen(heard: int) -> None:
    interrupts = 0
    while number := os.read(heard, 1):
        interrupts += number[0] == signal.SIGINT
        if signal.getsignal(number[0]) is _noted:
            word = signal.Signals(number[0]).name
            _leave(f'{word}: stopped; the same command goes on from what was saved', EXIT_STOPPED)
        if interrupts > 1:
            _leave('interrupted twice: what was not saved is lost', EXIT_KILLED)


def _leave(sentence: str, code: int) -> NoReturn:
    print(f'\n{sentence}', file=sys.stderr, flush=True)
    os._exit(code)
