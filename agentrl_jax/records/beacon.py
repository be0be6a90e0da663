"""Write now.json, the current state of a training run, for its live page."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.machine import files
from agentrl_jax.records.run_log import NOW_FILE

EVERY_S = 5.0  # seconds between writes; a workdir may be a bucket, where each write costs


class Beacon:
    """Write now() to now.json in a thread of process 0 when it changes; delete the file on exit."""

    def __init__(
        self, workdir: Path, now: Callable[[], Mapping[str, Any]], *, every_s: float = EVERY_S
    ):
        self._path, self._now, self._every_s = workdir / NOW_FILE, now, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name='beacon', daemon=True)

    def __enter__(self) -> 'Beacon':
        if jax.process_index() == 0:
            self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._stop.set()
        if self._thread.ident is not None:  # started
            self._thread.join()
            with contextlib.suppress(OSError):  # the workdir may be gone
                self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        written = ''
        while not self._stop.is_set():
            text = json.dumps(self._now(), default=str) + '\n'
            if text != written:
                with contextlib.suppress(OSError):  # a full disk: try again
                    files.write_atomic(self._path, text)
                    written = text
            self._stop.wait(self._every_s)
