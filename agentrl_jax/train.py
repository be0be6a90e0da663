"""Training: collect -> keep groups -> score -> make_batch -> update. Read this first.

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/demo
  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/x --config.optim.lr=3e-4
  python -m agentrl_jax.train --config=configs/demo.py --config.algorithm=dapo --show_config

The same command resumes from the newest checkpoint. Everything random is a function of (seed,
step), so a run that was killed and resumed ends with the same bits as an uninterrupted run.
--show_config prints the full config, with the values of the algorithm's paper, and exits.
"""

if __name__ == '__main__':
    from agentrl_jax.run import interrupts

    interrupts.exit_on_signals()
    from agentrl_jax.run import train_command

    train_command.start(__doc__)

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.machine import checkpoint, files, processes, sharding
from agentrl_jax.measure import collapse
from agentrl_jax.models.functions import policy_of
from agentrl_jax.planning import fit, work
from agentrl_jax.run import collecting, hosts, interrupts, measuring, recorder
from agentrl_jax.run.build import build
from agentrl_jax.run.cloning import draw_base
from agentrl_jax.run.hooks import Moment
from agentrl_jax.run.measuring import validate
from agentrl_jax.run.recorder import Played, Recorder
from agentrl_jax.run.run import Run
from agentrl_jax.run.state import (
    RunState,
    checkpoint_metadata,
    disk_bytes_needed,
    open_run,
    start_iteration,
)
from agentrl_jax.run.streams import COLLECT, SHUFFLE, Streams
from agentrl_jax.types import TrainState


def train_step(
    run: Run,
    opened: RunState,
    state: TrainState,
    step: int,
    first: bool,
    check: Callable[[str], None] = processes.go_on,
) -> tuple:
    """Run one step and wait for it: (state, metrics, tokens sampled, contents of its page).

    first: whether this is the process's first step, which compiles everything later steps need.
    check: called between programs, while `state` is valid (processes.Preemption.check).
    """
    check(f'the rollout of step {step}')
    cfg, programs, frozen = run.config, run.training, opened.frozen
    streams = Streams(cfg.seed)
    policy = policy_of(state.actor, frozen.model)
    began = time.monotonic()
    horizon = cfg.turn_limit(step)
    limit = np.int32(horizon)  # an argument, so a new value does not recompile
    tasks = tuple(task.replace(turn_limit=limit) for task in programs.tasks)
    players = policy
    for extension in cfg.extensions:
        state = extension.begin_step(state, step, first=first)
        players = extension.actor(players, state, frozen.model, streams, step)
    (rollout, episodes), sampled, measured, groups = collecting.collect(
        run, players, tasks, step, check
    )
    collected = time.monotonic()
    moment = Moment(state, frozen, policy, tasks, rollout, streams, step)
    measured |= measuring.probe(programs.probes, moment, first, check)
    probed = time.monotonic()
    shuffle = streams.key(SHUFFLE, step) if cfg.batch.shuffle else None
    base = draw_base(run, opened.base, step)
    check(f'the update of step {step}')
    state, learned, rows, advantages = programs.learn(state, frozen, rollout, shuffle, base)
    measured = jax.device_get(learned | measured | {'rollout/horizon': horizon})
    measured['time/collect_s'] = collected - began
    measured['time/update_s'] = time.monotonic() - probed
    key, collects = streams.key(COLLECT, step), measured['filter/collects']
    page = Played(rollout, episodes, key, horizon, rows, advantages, groups, collects)
    return state, measured, sampled, page


def train(given: Any, workdir: str, *, fallback: bool = False, replay: str = '') -> int:
    """Start or resume a run.

    fallback: use an older checkpoint if newer ones are damaged. replay: a run's log of replies to
    train from, without environments on hosts. Returns the exit code: 0; 1 if an alarm or steps
    without kept groups ended the run, or nothing was trained; 75 if preempted (rerun to resume).
    """
    with processes.exclusive_workdir(workdir) as alone_in:
        return resume(given, alone_in, fallback, replay)


def resume(given: Any, workdir: Path, fallback: bool, replay: str) -> int:
    """Run train() in a locked workdir. given: the ConfigDict."""
    run = build(given, probe=False) if replay else build(given)
    cfg = run.config
    processes.keep_programs(workdir.parent / 'programs', run.model.param_count())
    hosts.check_replay(run, replay)
    files.check_workdir(workdir, min_free_bytes=disk_bytes_needed(run, workdir))
    recorder.write_reference(run, workdir)
    preemption = processes.Preemption(silent=interrupts.listens())
    checkpoints, opened = open_run(run, workdir, fallback=fallback)
    if not cfg.lora.rank:  # the state has its own copy; adapters need this one
        run = dataclasses.replace(run, params=sharding.abstract_of(run.params))
    first = int(opened.state.step)
    if recorder.is_finished(run, workdir, first):
        checkpoint.close(checkpoints)
        return 0
    # Hold until the state is saved: launchers resend signals
    with preemption, interrupts.answering(preemption.notice):
        try:
            with hosts.playing(run, workdir, first, preemption.can_stop_now, replay=replay):
                code, state = play(run, opened, checkpoints, workdir, preemption)
                if state is not None:  # before closing environments, which may be slow
                    checkpoint.save(checkpoints, int(state.step), state, checkpoint_metadata(run))
        except (ValueError, OSError, RuntimeError):
            if jax.process_count() == 1:  # if there are others, they may be gone
                with contextlib.suppress(ValueError, OSError, RuntimeError):  # already reported
                    checkpoint.wait(checkpoints)  # finish writing
            raise
        checkpoint.close(checkpoints)
    recorder.report_end(run, workdir, code)
    return code


def play(
    run: Run,
    opened: RunState,
    checkpoints: checkpoint.Checkpoints,
    workdir: Path,
    preemption: processes.Preemption,
) -> tuple[int, TrainState | None]:
    """Run the remaining steps: (exit code, state to save)."""
    cfg, state = run.config, opened.state
    first, model, iteration_started = int(state.step), opened.frozen.model, False

    def save() -> None:
        """Save the state, unless its iteration has started: then it is already saved."""
        if not iteration_started:
            checkpoint.save(checkpoints, int(state.step), state, checkpoint_metadata(run))

    with (
        Recorder(run, workdir, first, work.rates) as record,
        saving(save),  # before closing records, which may wait for a network
    ):
        for step in range(first, cfg.steps + 1):
            record.begin(step)
            row, sampled, iteration_started = {}, None, False
            if measuring.is_due(cfg, step):
                with record.validating():
                    policy = policy_of(state.params, model)
                    row |= validate(run, policy, step, preemption.check)
                if cfg.checkpoint.best:
                    record.save_if_best(state.params, row['eval/success'])
            if step < cfg.steps:  # the last iteration only evaluates
                if cfg.starts_iteration(step):
                    if step > first:
                        save()  # an iteration cannot start twice
                    state, iteration_started = start_iteration(run, state, workdir), True
                with record.training():
                    state, measured, sampled, page = train_step(
                        run, opened, state, step, step == first, preemption.check
                    )
                    iteration_started = False
                    row |= measured
            row, alarm = record.write(row, sampled)
            if sampled is None:
                break
            where = f'step {step}, training episodes'
            collecting.check_tokens(row, sampled, where)
            record.advance()
            preemption.phase = f'the page of step {step}'
            if not preemption.any_requested():
                record.page(policy_of(state.params, model), page)
            if alarm:
                record.say(f'step {step}: the run ends here ({alarm})')
                return 1, state
            if preemption.any_requested():
                record.say(f'asked to stop: saving step {step + 1}')
                save()
                return processes.EXIT_PREEMPTED, state
            if (step + 1) % cfg.checkpoint.every == 0:
                checkpoint.save(checkpoints, step + 1, state, checkpoint_metadata(run))
            if problem := collapse.starved(record.history, cfg.algorithm.filter.max_empty):
                record.say(f'step {step}: {problem}')
                return 1, state
            if not cfg.algorithm.other_models and (
                advice := collapse.no_variance_hint(record.history)
            ):
                record.say(f'step {step}: {advice}')
        if problem := collapse.untrained(record.history):
            record.say(problem)
            return 1, state
        return 0, state
    record.say(f'asked to stop: step {int(state.step)} will be computed after resuming')
    return processes.EXIT_PREEMPTED, None if iteration_started else state


@contextlib.contextmanager
def saving(save: Callable[[], None]) -> Iterator[None]:
    """Call `save` immediately if processes.Interrupted leaves this context."""
    try:
        yield
    except processes.Interrupted:
        save()


if __name__ == '__main__':
    train_command.main(train, fit.check)
