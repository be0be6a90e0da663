"""What a run does for its worlds on hosts: keeps what they say, and closes them.

Each function does nothing where the worlds are on the device.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.machine import files, processes
from agentrl_jax.rollout import host, replies

# How what a rollout counts becomes a figure of a step: over its rollouts, then over the processes
COUNTED = {
    'hosts/waited_s': (np.sum, np.max),
    'hosts/reply_s': (np.mean, np.mean),
    'hosts/slowest_s': (np.max, np.max),
    'hosts/idle_slots': (np.mean, np.mean),
    'hosts/retries': (np.sum, np.sum),
    'hosts/timeouts': (np.sum, np.sum),
    'hosts/faults': (np.sum, np.sum),
    'hosts/cut': (np.sum, np.sum),
}


def log_name(stem: str = 'replies', process: int | None = None) -> str:
    """Each process keeps what its own worlds say; None = this one."""
    process = jax.process_index() if process is None else process
    return f'{stem}{f"_{process}" if process else ""}.jsonl'


@contextlib.contextmanager
def playing(
    run: Any, path: Path, step: int, asked: Callable[[], bool] = host.never
) -> Iterator[None]:
    """What worlds say is kept in the file `path`, behind that of the steps before `step`.

    In the end the worlds are closed. asked: whether the run should stop; while all worlds are down
    nothing else would hear of it, and game.Interrupted ends the rollout.
    """
    if run.worlds is None:
        yield
        return
    replies.cut(path, step, files.write_atomic)
    run.worlds.log, run.worlds.asked = replies.ReplyLog(path), asked
    try:
        yield
    finally:
        run.worlds.pool.close()
        run.worlds.log.close()
        run.worlds.log, run.worlds.asked = replies.NoLog(), host.never


@contextlib.contextmanager
def replayed(run: Any, path: str, about: replies.About) -> Iterator[None]:
    """The log of a rollout answers, and no world does."""
    if run.worlds is None:
        raise ValueError(f'--replay: env.name={run.cfg.env.name!r} has no worlds on hosts')
    lines, before = replies.choose(path, about), run.worlds.pool
    run.worlds.pool = replies.LoggedPool(lines, run.worlds.conversation.prompt)
    try:
        yield
    finally:
        run.worlds.pool = before


def label(run: Any, **about: int | str) -> None:
    """Says of which rollout the next replies are."""
    if run.worlds is not None:
        run.worlds.log.about = about


def said(
    run: Any, path: Path, streams: Iterable[int], **about: int | str
) -> list[list[dict[str, Any]]] | None:
    """The lines that the logs hold of each episode of a rollout, for its page; None on the device.

    path: of process 0, the others' lie beside it. streams int32 [B]: of the episodes' tokens. Of an
    episode that was played again only the last time counts.
    """
    if run.worlds is None:
        return None
    found: dict[int, list] = {}
    for process in range(jax.process_count()):
        log = path.with_name(log_name(path.stem, process)) if process else path
        for line in replies.newest(log, int(about['step'])):
            if about.items() <= line.items():
                before = found[line['stream']] if line['turn'] else []
                found[line['stream']] = [*before, line]
    return [found[stream] if stream in found else [] for stream in map(int, streams)]


def in_flight(run: Any) -> dict[str, Any] | None:
    """For a live line: where the rollout is that is being played; None = there is none."""
    game = run.worlds.game if run.worlds is not None else None
    if game is None:
        return None
    now = game.in_flight()
    return {
        'waited for': now.waiting,
        'slowest': f'{now.slowest_s:.1f} s',
        'on the device': now.playing,
        'to begin': now.left,
        'retries': now.retries,
        'faults': now.faults,
    }


def figures(counters: list[dict[str, Any]]) -> dict[str, float]:
    """hosts/ metrics of the rollouts of a step, of all processes; none for those on the device."""
    if not COUNTED.keys() <= counters[0].keys():
        return {}
    own = [
        over_rollouts([float(one[name][0]) for one in counters])
        for name, (over_rollouts, _) in COUNTED.items()
    ]
    every = processes.gather(np.array(own, np.float32))  # [P, n]
    return {
        name: float(over_processes(every[:, i]))
        for i, (name, (_, over_processes)) in enumerate(COUNTED.items())
    }
