"""What a run does for its worlds on hosts: keeps what they say, and closes them.

Each function does nothing where the worlds are on the device.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.machine import files
from agentrl_jax.rollout import replies

# How what a rollout counts becomes a figure of several rollouts of a step
COUNTED = {
    'hosts/waited_s': np.sum,
    'hosts/reply_s': np.mean,
    'hosts/idle_slots': np.mean,
    'hosts/retries': np.sum,
    'hosts/timeouts': np.sum,
    'hosts/faults': np.sum,
    'hosts/cut': np.sum,
}


def log_name(stem: str = 'replies') -> str:
    """Each process keeps what its own worlds say."""
    process = jax.process_index()
    return f'{stem}{f"_{process}" if process else ""}.jsonl'


@contextlib.contextmanager
def playing(run: Any, path: Path, step: int) -> Iterator[None]:
    """What worlds say is kept in the file `path`, behind that of the steps before `step`.

    In the end the worlds are closed.
    """
    if run.worlds is None:
        yield
        return
    replies.cut(path, step, files.write_atomic)
    run.worlds.log = replies.ReplyLog(path)
    try:
        yield
    finally:
        run.worlds.pool.close()
        run.worlds.log.close()
        run.worlds.log = replies.NoLog()


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


def figures(counters: list[dict[str, Any]]) -> dict[str, float]:
    """hosts/ metrics of the rollouts of a step; none for rollouts on the device."""
    return {
        name: float(reduce([np.asarray(one[name]).sum() for one in counters]))
        for name, reduce in COUNTED.items()
        if name in counters[0]
    }
