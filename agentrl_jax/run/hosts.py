"""What a run does for its worlds on hosts: keeps what they say, and closes them.

Each function does nothing where the worlds are on the device.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.world import Foreign
from agentrl_jax.machine import processes
from agentrl_jax.rollout import host, replies, versions
from agentrl_jax.rollout.keepers import Request, Response
from agentrl_jax.run.run import Run
from agentrl_jax.run.usage import WrongUsage

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


def of_world(cfg: Any, stem: str, world: str) -> str:
    """The name of what each world of env.mix has of its own: replies_sokoban, eval_sokoban."""
    return f'{stem}_{world}' if cfg.env.mix else stem


def probe(env: HostEnvironment, tries: int) -> None:
    """Makes a world and closes it, where they are in this process; a ValueError says what failed.

    Before that it raises what is not installed. Servers are not asked: a run waits for those that
    are down.
    """
    env.check()
    if not env.here:
        return
    for _ in range(tries):
        response = Response(Request(slot=-1, stream=-1, item=-1))
        with Foreign(response.fail):
            env.make().close()
        if not response.fault or response.down:
            return
    said = ' '.join(response.fault.split())
    raise ValueError(f'env.name={env.name!r}: no world can be made: {said}')


@contextlib.contextmanager
def playing(
    run: Run,
    folder: Path | None,
    step: int,
    asked: Callable[[], bool] = host.never,
    stem: str = 'replies',
    replay: str = '',
) -> Iterator[None]:
    """Keep what worlds say in logs of a folder, if any, after that of the steps before `step`.

    In the end the worlds are closed. asked: whether the run should stop, which ends a rollout by
    processes.Interrupted. replay: the log of a run that answers in their place.
    """
    with contextlib.ExitStack() as stack:
        for name, worlds in run.worlds.items():
            path = folder and folder / log_name(of_world(run.config, stem, name))
            stack.enter_context(logged(worlds, path, step, asked, replay))
        yield


def set_aside(run: Run, folder: Path, stem: str) -> None:
    """Logs of earlier evaluations get another name: what worlds said there is needed to replay."""
    for name in run.worlds:
        path = folder / log_name(of_world(run.config, stem, name))
        for log in (path, versions.path_beside(path)):
            if log.exists():
                log.rename(replies.free_name(log, 'earlier'))


def check_replay(run: Run, path: str) -> None:
    """WrongUsage where no log of replies can answer."""
    if path and not run.worlds:
        raise WrongUsage(f'--replay: env.name={run.config.env.name!r} has no worlds on hosts')
    if path and run.config.env.mix:
        raise WrongUsage('--replay: a log is of one world, and env.mix has several')


@contextlib.contextmanager
def logged(
    worlds: host.Worlds, path: Path | None, step: int, asked: Callable[[], bool], replay: str
) -> Iterator[None]:
    """`playing` for the worlds of one name."""
    before = worlds.pool
    if replay:
        read = worlds.conversation.prompt
        worlds.pool = replies.LoggedPool(replies.read_log(replay), read, replay)
        worlds.plan = functools.partial(versions.Plan, versions.path_beside(replay))
    if path:
        worlds.version_log = versions.path_beside(path)
        worlds.restarted = replies.begun(path, step)
        replies.cut(path, step)
        replies.cut(worlds.version_log, step, versions.line_of)
    worlds.log, worlds.asked = replies.ReplyLog(path), asked
    try:
        yield
    finally:
        worlds.pool, worlds.plan, worlds.version_log = before, None, None
        worlds.close()
        worlds.log.close()
        worlds.log, worlds.asked = replies.ReplyLog(), host.never


def label(run: Run, **about: int | str) -> None:
    """Says of which rollout the next replies are."""
    for worlds in run.worlds.values():
        worlds.log.about = about


def said(
    run: Run, world: str, path: Path, streams: Iterable[int], **about: int | str
) -> list[list[dict[str, Any]]] | None:
    """The lines that the logs hold of each episode of a rollout, for its page; None on the device.

    path: the world's log of process 0, the others' lie beside it. streams int32 [B]: of the
    episodes' tokens. Of an episode that was played again only the last time counts.
    """
    if world not in run.worlds:
        return None
    found: dict[int, list] = {}
    for process in range(jax.process_count()):
        log = path.with_name(log_name(path.stem, process)) if process else path
        # Episodes of a step may have begun in earlier ones
        for line in replies.newest(log, int(about['step']) - run.config.rollout.staleness):
            if about.items() <= line.items():
                before = found.get(line['stream'], []) if line['turn'] else []
                found[line['stream']] = [*before, line]
    return [found[stream] if stream in found else [] for stream in map(int, streams)]


def in_flight(run: Run) -> dict[str, Any] | None:
    """For a live line: where the rollout is that is being played; None = there is none."""
    playing = [worlds.rollout for worlds in run.worlds.values() if worlds.rollout is not None]
    if not playing:
        return None
    return playing[0].in_flight()  # worlds of several names are played one after another


def figures(counters: list[dict[str, Any]]) -> dict[str, float]:
    """hosts/ metrics of the rollouts of a step, of all processes; none for those on the device."""
    counters = [one for one in counters if COUNTED.keys() <= one.keys()]
    if not counters:
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
