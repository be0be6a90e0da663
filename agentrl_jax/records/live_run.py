"""What the files of a workdir tell about a run that may be training.

Only reads. Files that are written as a whole (config.json) are whole at any moment; metrics.jsonl
grows, so its rows are read on from where the last look ended.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_jax.machine import files, lock
from agentrl_jax.records import run_log
from agentrl_jax.records.page_html import PAGE_NAME

NOW_FILE = 'now.json'  # what a training does at this moment (records/beacon.py)
SIGNS = (  # files of which a run has one from its beginning on
    run_log.CONFIG_FILE,
    run_log.METRICS_FILE,
    run_log.REFERENCE_FILE,
    lock.LEASE_FILE,
)


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """One look at a run."""

    name: str
    state: str  # 'training', 'training on <host>', 'finished', 'stopped' or 'not started'
    rows: list[dict[str, float]]
    config: Mapping[str, Any] | None  # the resolved one
    argv: list[str]
    commit: str
    machine: str
    reference: dict[str, float]  # success of random play and of the oracle
    roll_backs: list[dict[str, Any]]
    now: Mapping[str, Any]  # of a training: see records/beacon.py
    pages: list[str]  # names of rollout pages, the newest first
    problems: list[str]  # files that could not be read

    @property
    def steps(self) -> int | None:
        """How many there will be."""
        steps = self.config['steps'] if self.config and 'steps' in self.config else None
        return steps if isinstance(steps, int) else None


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in SIGNS) or (folder / 'rollouts').is_dir()


class Looker:
    """Looks at one run again and again."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows: list[dict[str, float]] = []
        self._place = (0, 0)  # which file, and how much of it has been read

    def look(self) -> RunFiles:
        problems: list[str] = []

        def tried(read: Callable[[], Any], otherwise: Any) -> Any:
            try:
                return read()
            except (OSError, ValueError) as error:
                problems.append(files.in_words(error))
                return otherwise

        made = tried(lambda: self._object(run_log.CONFIG_FILE), {})
        config = made['config'] if isinstance(made.get('config'), dict) else None
        reference = tried(lambda: self._object(run_log.REFERENCE_FILE), {})
        numbers = {name: run_log.to_number(value) for name, value in reference.items()}
        undone = tried(lambda: self._json(run_log.ROLL_BACKS_FILE, []), [])
        argv = made.get('argv')
        state = tried(self._state, 'stopped')
        return RunFiles(
            name=self._folder.name,
            state=state,
            rows=tried(self.read_rows, self._rows),
            config=config,
            argv=[str(word) for word in argv] if isinstance(argv, list) else [],
            commit=str(made.get('commit') or ''),
            machine=str(made.get('machine') or ''),
            reference={name: value for name, value in numbers.items() if value is not None},
            roll_backs=[x for x in undone if isinstance(x, dict)]
            if isinstance(undone, list)
            else [],
            now=tried(lambda: self._object(NOW_FILE), {}) if 'training' in state else {},
            pages=tried(self._pages, []),
            problems=problems,
        )

    def read_rows(self) -> list[dict[str, float]]:
        """All whole rows so far; ValueError for a line that is none."""
        path = self._folder / run_log.METRICS_FILE
        if not path.exists():
            self._rows, self._place = [], (0, 0)
            return []
        if not path.is_file():
            raise ValueError(f'{path} is no regular file')
        with path.open('rb') as file:
            about = os.fstat(file.fileno())
            if self._place[0] != about.st_ino or self._place[1] > about.st_size:
                self._rows, self._place = [], (about.st_ino, 0)  # a run that resumed writes it anew
            file.seek(self._place[1])
            whole = file.read().rpartition(b'\n')[0]  # the last line is still being written
        found = []
        for line in whole.split(b'\n') if whole else []:
            try:
                found.append(run_log.parse_row(line))
            except ValueError as error:
                raise ValueError(f'{path}, after {len(found)} more rows: {error}') from error
        read = len(whole) + 1 if whole else 0
        self._rows = [*self._rows, *found]
        self._place = (about.st_ino, self._place[1] + read)
        return self._rows

    def _json(self, name: str, otherwise: Any) -> Any:
        path = self._folder / name
        return files.read_json(path) if path.exists() else otherwise

    def _object(self, name: str) -> dict[str, Any]:
        found = self._json(name, {})
        if not isinstance(found, dict):
            raise ValueError(f'{self._folder / name}: an object is expected')
        return found

    def _state(self) -> str:
        host = lock.owner(self._folder)
        if host:
            return 'training' if host == lock.HERE else f'training on {host}'
        if run_log.finished_step(self._folder) is not None:
            return 'finished'
        return 'stopped' if (self._folder / run_log.METRICS_FILE).exists() else 'not started'

    def _pages(self) -> list[str]:
        folder = self._folder / 'rollouts'
        found = []
        for path in folder.iterdir() if folder.is_dir() else []:
            if name := PAGE_NAME.fullmatch(path.name):
                found.append((int(name[2] or -1), path.name))
        return [name for _, name in sorted(found, reverse=True)]
