"""now.json: what a run does at this moment, for the page that shows it while it trains."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.machine import files
from agentrl_jax.records.live_run import NOW_FILE

EVERY_S = 5.0  # between two looks: a workdir may be a bucket, where every writing costs


class Beacon:
    """with Beacon(workdir, progress.now): what `now` says is in now.json, which is gone at the end.

    A thread of process 0 writes the file where something changed.
    """

    def __init__(
        self, workdir: Path, now: Callable[[], Mapping[str, Any]], *, every_s: float = EVERY_S
    ):
        self._path, self._now, self._every_s = workdir / NOW_FILE, now, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name='beacon', daemon=True)

    def __enter__(self) -> 'Beacon':
        if jax.process_index() == 0:
            self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the disk may be full, the workdir gone
                self._path.unlink(missing_ok=True)

    def _live(self) -> None:
        written = ''
        while not self._ended.is_set():
            text = json.dumps(self._now(), default=str) + '\n'
            if text != written:
                with contextlib.suppress(OSError):  # a full disk, a server that is away: once more
                    files.write_atomic(self._path, text)
                    written = text
            self._ended.wait(self._every_s)
