"""Child processes that lead process groups: killing one also kills all processes it has started.

A child of this package exchanges JSON lines with its parent over stdin and stdout. It exits at the
end of its input, however its parent died.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

STUCK_S = 120  # the kernel ends the child if other Python threads cannot run for this long


# ---- in the parent -----------------------------------------------------------------------------


def start(
    words: Sequence[str], *, env: dict[str, str] | None = None, **pipes: Any
) -> subprocess.Popen:
    """Start a program as the leader of a process group; env is added to the environment."""
    return subprocess.Popen(
        words, env={**os.environ, **(env or {})}, start_new_session=True, **pipes
    )


def kill_group(pid: int) -> None:
    """Kill a process and all processes it has started, even if it has already exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def kill(process: subprocess.Popen) -> int:
    """Kill the group of a process and return the exit code of the process."""
    kill_group(process.pid)
    return process.wait()


class Child:
    """A module of this package that runs as a program."""

    def __init__(self, module: str, *words: str, **more: Any):
        """more: arguments of subprocess.Popen, such as stderr; env is added to the environment."""
        paths = [*sys.path, *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
        paths = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        env = {'PYTHONPATH': paths} | more.pop('env', {})
        command = [sys.executable, '-m', module, *words]
        pipe = subprocess.PIPE
        self.process = start(command, env=env, stdin=pipe, stdout=pipe, **more)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, message: Any) -> Any:
        """Send a message and return the reply. Raises EOFError if the child exits first."""
        try:
            self.process.stdin.write(json.dumps(message).encode() + b'\n')
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b''
        if not line.endswith(b'\n'):
            raise EOFError
        return json.loads(line)

    def kill(self) -> int:
        return kill(self.process)


# ---- in the child ------------------------------------------------------------------------------


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return (input, output) for messages only; other code may still use stdin and stdout."""
    threading.Thread(target=stay_awake, daemon=True).start()
    messages, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return messages, replies


def stay_awake() -> None:
    """Set an alarm that only goes off if some code never releases Python's lock."""
    while True:
        signal.alarm(STUCK_S)
        time.sleep(1)


def end_group() -> None:
    """Kill this process and all processes it has started."""
    os.killpg(os.getpgid(0), signal.SIGKILL)
