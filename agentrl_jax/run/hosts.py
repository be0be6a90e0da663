"""Environments on hosts during a run: log their replies and close them.

Each function does nothing for environments on the device.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.world import world_errors
from agentrl_jax.machine import processes, sharding
from agentrl_jax.rollout import host, replies, rewards, versions
from agentrl_jax.rollout.keepers import Pool, Request, Response
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.config import Config
from agentrl_jax.run.refilling import Played
from agentrl_jax.run.run import Run
from agentrl_jax.run.streams import COLLECT, LEVELS, Streams
from agentrl_jax.run.usage import WrongUsage
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Conversation, HostTask, Task, build_host_task
from agentrl_jax.text.stops import build_stop_table
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params

POLL = 8  # maximum number of tokens sampled between checks for replies of environments on hosts
# How counters are aggregated into a step's metrics: over its rollouts, then over processes
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
    """Return the name of a process's reply log; None = this process."""
    process = jax.process_index() if process is None else process
    return f'{stem}{f"_{process}" if process else ""}.jsonl'


def of_world(cfg: Any, stem: str, world: str) -> str:
    """Return a stem per environment of env.mix: replies_sokoban, eval_sokoban."""
    return f'{stem}_{world}' if cfg.env.mix else stem


def build_conversation(cfg: Config, tokenizer: Tokenizer, env: HostEnvironment) -> Conversation:
    """Build the converter between texts of environments on hosts and token ids."""
    return Conversation(
        build_chat(tokenizer),
        cfg.answer_opening,
        cfg.hosts.max_observation,
        preamble=env.instruction,
        agent=cfg.agent.build(),
    )


def build_worlds(cfg: Config, tokenizer: Tokenizer) -> host.Worlds:
    """Build the pool of environments on hosts, which are created when needed."""
    (env,) = cfg.worlds
    conversation = build_conversation(cfg, tokenizer, env)
    return host.Worlds(Pool(env.make, conversation.prompt), conversation)


def build_task(
    cfg: Config, tokenizer: Tokenizer, split: str, env: HostEnvironment, env_params: Any
) -> HostTask:
    """Build environments on hosts as text."""
    del split
    return build_host_task(
        env,
        env_params,
        build_conversation(cfg, tokenizer, env),
        max_turns=cfg.env.max_turns,
        forms=cfg.answer_forms(env),
        spelling=cfg.rollout.constrain,
        max_response=cfg.rollout.max_response,
    )


def build_collect(
    cfg: Config, mesh: Any, worlds: host.Worlds, prepare: Callable, settings: RolloutSettings
) -> host.HostCollect:
    """Build `collect` against environments on hosts."""
    fields = cfg.hosts
    tokenizer = worlds.conversation.chat.tokenizer
    stop = (*fields.stop, *agents.closings(worlds.conversation.agent))
    return host.HostCollect(
        mesh,
        sharding.local_mesh(mesh),
        worlds,
        settings=settings,
        strings=build_stop_table(tokenizer.token_bytes(), stop),
        read_tokens=fields.read_tokens,
        poll=POLL,
        policy=fields.policy,
        prepare=prepare,
        reward=rewards.load(cfg.reward.function, cfg.reward.components),
    )


def collect_stale(
    run: Run, params: Params, tasks: tuple[Task, ...], step: int
) -> tuple[Played, list[dict[str, Any]]]:
    """Play a rollout of the run's only environment while episodes of later steps are in flight.

    Each step has the same levels as without staleness. Streams number the episodes of the run.
    """
    (task,), (collect,), cfg = tasks, run.training.collects, run.config
    streams = Streams(cfg.seed)

    def draw(of):
        return run.training.draw(streams.key(LEVELS), of, of * cfg.rollout.episodes)[0]

    rollout, counters = collect.collect_ahead(
        params,
        task,
        draw,
        streams.key(COLLECT),
        step=step,
        last=cfg.steps - 1,
        staleness=cfg.rollout.staleness,
    )
    return (rollout, (draw(step),)), [counters]


def probe(env: HostEnvironment, tries: int) -> None:
    """Create and close an environment that runs in this process; ValueError if that fails.

    Missing packages raise first. Servers are not contacted: a run waits until they are up.
    """
    env.check()
    if not env.here:
        return
    for _ in range(tries):
        response = Response(Request(slot=-1, stream=-1, item=-1))
        with world_errors(response.fail):
            env.make().close()
        if not response.fault or response.down:
            return
    reason = ' '.join(response.fault.split())
    raise ValueError(f'env.name={env.name!r}: cannot create an environment: {reason}')


@contextlib.contextmanager
def playing(
    run: Run,
    folder: Path | None,
    step: int,
    asked: Callable[[], bool] = host.never,
    stem: str = 'replies',
    replay: str = '',
) -> Iterator[None]:
    """Log the environments' replies in a folder (None: nowhere), after those before `step`.

    Closes the environments at the end. asked: returns whether the run should stop, which ends a
    rollout with processes.Interrupted. replay: a run's log that supplies the replies instead.
    """
    with contextlib.ExitStack() as stack:
        for name, worlds in run.worlds.items():
            path = folder and folder / log_name(of_world(run.config, stem, name))
            stack.enter_context(logged(worlds, path, step, asked, replay))
        yield


def archive_logs(run: Run, folder: Path, stem: str) -> None:
    """Rename the logs of earlier evaluations, which are needed to replay them."""
    for name in run.worlds:
        path = folder / log_name(of_world(run.config, stem, name))
        for log in (path, versions.versions_path(path)):
            if log.exists():
                log.rename(replies.free_name(log, 'earlier'))


def check_replay(run: Run, path: str) -> None:
    """Raise WrongUsage if the run's environments cannot be replayed from a log."""
    if path and not run.worlds:
        raise WrongUsage(f'--replay: env.name={run.config.env.name!r} does not run on hosts')
    if path and run.config.env.mix:
        raise WrongUsage('--replay: a log holds one environment, but env.mix has several')


@contextlib.contextmanager
def logged(
    worlds: host.Worlds, path: Path | None, step: int, asked: Callable[[], bool], replay: str
) -> Iterator[None]:
    """`playing` for the environments of one name."""
    before = worlds.pool
    if replay:  # each process has a log of its own
        replay = str(Path(replay).with_name(log_name(Path(replay).stem)))
        read = worlds.conversation.prompt
        worlds.pool = replies.LoggedPool(replies.read_log(replay), read, replay)
        worlds.plan = functools.partial(versions.Plan, versions.versions_path(replay))
    if path:
        worlds.version_log = versions.versions_path(path)
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
    """Tag the next replies with their rollout."""
    for worlds in run.worlds.values():
        worlds.log.about = about


def said(
    run: Run, world: str, path: Path, streams: Iterable[int], **about: int | str
) -> list[list[dict[str, Any]]] | None:
    """Return the log lines of each episode of a rollout, for its page; None on the device.

    path: the environment's log of process 0, next to the other processes' logs. streams int32 [B]:
    token streams of the episodes. If an episode was played again, only the last time counts.
    """
    if world not in run.worlds:
        return None
    lines: dict[int, list] = {}
    for process in range(jax.process_count()):
        log = path.with_name(log_name(path.stem, process)) if process else path
        # Episodes of a step may have started in earlier steps
        for line in replies.newest(log, int(about['step']) - run.config.rollout.staleness):
            if about.items() <= line.items():
                before = lines.get(line['stream'], []) if line['turn'] else []
                lines[line['stream']] = [*before, line]
    return [lines[stream] if stream in lines else [] for stream in map(int, streams)]


def in_flight(run: Run) -> dict[str, Any] | None:
    """Return the progress of the rollout in flight, for a live line; None if there is none."""
    playing = [worlds.rollout for worlds in run.worlds.values() if worlds.rollout is not None]
    if not playing:
        return None
    return playing[0].in_flight()  # environments of different names are played one at a time


def figures(counters: list[dict[str, Any]]) -> dict[str, float]:
    """Return the hosts/ metrics of a step over all processes; {} on the device."""
    counters = [one for one in counters if COUNTED.keys() <= one.keys()]
    if not counters:
        return {}
    local = [
        over_rollouts([float(one[name][0]) for one in counters])
        for name, (over_rollouts, _) in COUNTED.items()
    ]
    every = processes.gather(np.array(local, np.float32))  # [P, n]
    return {
        name: float(over_processes(every[:, i]))
        for i, (name, (_, over_processes)) in enumerate(COUNTED.items())
    }
