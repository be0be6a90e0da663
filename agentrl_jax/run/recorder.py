"""Records of a training run: rows of metrics, a progress bar and pages of rollouts."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from agentrl_jax.machine import processes, profiling
from agentrl_jax.measure import collapse, totals
from agentrl_jax.records import about, pages, report, run_log
from agentrl_jax.records.markup import many
from agentrl_jax.records.progress import Progress, beacon
from agentrl_jax.run import command, hosts, mixture, params
from agentrl_jax.run.config import Config
from agentrl_jax.run.run import Run
from agentrl_jax.run.state import checkpoint_metadata
from agentrl_jax.types import Episodes, Params, Rollout

WARM_UP_STEPS = 2  # steps in which programs may compile


class Played(NamedTuple):
    """The contents of a step's page."""

    rollout: Rollout
    episodes: tuple[Episodes, ...]  # of each environment
    key: jax.Array  # the key of collect
    horizon: int  # turn limit of the episodes
    rows: jax.Array  # int32 [b]  rows of the update
    advantages: jax.Array  # float32 [b, T]
    groups: int | None  # number of first groups held by dynamic sampling; None without it
    collects: int  # rollouts of the step


class Recorder(contextlib.ExitStack):
    """A context that records rows, progress and pages of the steps from `first` on."""

    def __init__(self, run: Run, workdir: Path, first: int, rates: Callable):
        """rates(cfg, model, devices, row) -> perf/ metrics of a row."""
        super().__init__()
        self.run, self.workdir, self.first = run, workdir, first
        self.rates = rates
        self.compiled, self.warm, self.validated = processes.CompileCounter(), None, False
        self.fetched, self.host_s = None, 0.0

    def __enter__(self) -> 'Recorder':
        super().__enter__()
        run, cfg, workdir, first = self.run, self.run.config, self.workdir, self.first
        if jax.process_index() == 0:
            run_log.write_config(workdir, run.config_dict, sys.argv)
            pages.cut(workdir, first)
        with contextlib.ExitStack() as opened:  # closed if a later line raises
            self.log = opened.enter_context(
                run_log.RunLog(
                    workdir,
                    resume_step=first,
                    tensorboard=cfg.log.tensorboard,
                    wandb_project=cfg.log.wandb_project,
                    config=run.config_dict,
                    process_index=jax.process_index(),
                )
            )
            progress = Progress(cfg.steps, 'training', done=first, workdir=workdir)
            self.progress = opened.enter_context(progress)
            opened.enter_context(beacon(workdir, self.progress.now))
            last = last_traced(cfg, first)
            traced = profiling.Trace(workdir, first=first + WARM_UP_STEPS, last=last)
            self.trace = opened.enter_context(traced)
            rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
            # Process 0 may not have truncated it yet
            self.history = [row for row in rows if row['step'] < first]
            self.progress.watch('worlds', functools.partial(hosts.in_flight, run))
            self.say(f'step {first}: compiling the programs of validation, rollout and update')
            self.push(opened.pop_all())
        return self

    def say(self, text: str) -> None:
        self.progress.say(text)

    def begin(self, step: int) -> None:
        self.step, self.began, self.before = step, time.monotonic(), self.compiled.count
        self.host_s = 0.0 if self.fetched is None else self.began - self.fetched

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Context of a validation; the first one compiles."""
        with self.compiled, self.progress.phase('of validation'):
            yield
        if self.warm is not None and not self.validated:  # a resumed run may first validate late
            self.warm += self.compiled.count - self.before
        self.validated = True

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context of a training step, until its metrics are on the host."""
        phase = self.progress.phase('of training')
        with self.compiled, phase, self.trace.step(self.step):
            yield
            self.fetched = time.monotonic()

    def write(self, row: dict[str, Any], sampled: int | None) -> tuple[dict[str, float], str]:
        """Complete and write a step's row; return (row, alarm that ends the run or '').

        sampled: number of training tokens; None if the step did not train.
        """
        cfg, run, step = self.run.config, self.run, self.step
        spent = time.monotonic() - self.began
        if step == self.first:
            took = f'{self.compiled.seconds:.0f} s for {self.compiled.count} programs'
            self.say(f'step {step} is done; compilation took {took}')
        if self.warm is None and step - self.first + 1 == WARM_UP_STEPS:
            self.warm = self.compiled.count
        row['time/step_s'] = spent
        row['perf/recompiles'] = 0 if self.warm is None else self.compiled.count - self.warm
        if sampled is not None:
            row['time/host_s'] = self.host_s
            row['perf/tokens_per_s'] = sampled / spent
            row |= self.rates(cfg, run.model, run.mesh.devices.flat, row)
        row |= totals.so_far(
            self.history, row, step, sampled=sampled or 0, episodes=cfg.rollout.episodes
        )
        row |= profiling.peak_memory()
        self.history.append(run_log.plain_row(step, row))
        alarms = self.check_alarms()
        self.log.write(step, self.history[-1])
        for alarm in alarms.values():
            if alarm.news:
                self.say(f'step {step}: {alarm.reason}')
        raised = (name for name, alarm in alarms.items() if alarm.level == 'alarm')
        return self.history[-1], next((x for x in raised if x in cfg.alarm.stop), '')

    def check_alarms(self) -> Mapping[str, collapse.Alarm]:
        """Return the alarms of all rows, and write the newest row's alarm/ metrics."""
        newest = self.history[-1]
        if 'collapse/mi_token' in newest:
            newest['collapse/mi_z_ema'] = collapse.smoothed_z(self.history)
        alarms = collapse.judge_all(self.history, self.run.config.alarm.off)
        newest['alarm/level'] = collapse.worst_level(alarms)
        return alarms

    def advance(self) -> None:
        """Advance the progress bar by one step."""
        row = self.history[-1]
        evaluated = [before['eval/success'] for before in self.history if 'eval/success' in before]
        self.progress.advance(
            1,
            success=row['rollout/success'],
            **{'held-out': evaluated[-1] if evaluated else float('nan')},
            **{'return': row['rollout/return']},
            entropy=row['policy/entropy'],
        )

    def save_if_best(self, trained: Params, success: float) -> None:
        """Save the trainable parameters if this step's eval/success is the best so far."""
        saved = checkpoint_metadata(self.run) | {'step': self.step, 'eval/success': success}
        params.save_if_best(self.workdir, trained, saved)

    def page(self, policy: Params, played: Played) -> None:
        """Save a page of the step's rollout if one is due, with the ratios after its update."""
        cfg, every = self.run.config, self.run.config.log.rollouts_every
        if self.step == cfg.steps - 1 or (every and self.step % every == 0):
            save_page(self.run, self.workdir, self.step, policy, played)


def write_reference(run: Run, workdir: Path) -> None:
    """Write random play and the oracle of the run's pools."""
    if jax.process_index() == 0:
        pools = {pool.prefix: pool.task for pool in run.pools}
        report.write_reference(workdir, pools, run.config.env.eval_levels)


def is_finished(run: Run, workdir: Path, step: int) -> bool:
    """Return whether a run at `step` finished earlier with the same config.steps; print so."""
    done = run_log.finished_step(workdir)
    if done is None or not done == run.config.steps == step:
        return False
    if jax.process_index() == 0:
        words = [word for word in sys.argv if not word.startswith('--config.steps=')]
        print(report.finished(workdir, command.resume_line(words, 'agentrl_jax.train')))
    return True


def report_end(run: Run, workdir: Path, code: int) -> None:
    """Draw the curves and print the summary of a run that ends with an exit code."""
    if jax.process_index():
        return
    again = command.resume_line(sys.argv, 'agentrl_jax.train')
    if code == processes.EXIT_PREEMPTED:
        print(report.stopped(workdir, again), file=sys.stderr, flush=True)
    report.write_curves(workdir, about.title(run.config_dict))
    if code == 0:
        print(report.summary(workdir, again))
        run_log.write_finished(workdir, run.config.steps)


def last_traced(cfg: Config, first: int) -> int:
    """Return the last traced step of a run that starts at `first`, at most its last step."""
    return min(first + WARM_UP_STEPS + cfg.log.profile_steps, cfg.steps) - 1


def save_page(run: Run, workdir: Path, step: int, policy: Params, played: Played) -> None:
    """Save the rollout of a step as a page, with the ratios after its update."""
    rollout, episodes = jax.tree.map(processes.fetch, (played.rollout, played.episodes))
    after = processes.fetch(run.training.rescore(policy, played.rollout))
    spread = np.full(rollout.tokens.shape, np.nan, np.float32)
    spread[processes.fetch(played.rows)] = processes.fetch(played.advantages)
    if jax.process_index():
        return
    extras = {'ratio': np.exp(after - rollout.logprobs), 'advantages': spread}
    title = f'training rollout of step {step}'
    if played.groups is not None:
        held = played.groups * run.config.rollout.group_size
        rollout, episodes, extras = jax.tree.map(lambda x: x[:held], (rollout, episodes, extras))
        title += f': groups that dynamic sampling kept, of {many(played.collects, "rollout")}'
    parts = mixture.blocks([len(listed.level) for listed in episodes], (rollout, extras))
    for task, listed, (rows, row_extras) in zip(run.training.tasks, episodes, parts, strict=True):
        world = task.env.name
        pages.write(
            workdir,
            f'{world}_step_{step:06d}' if run.config.env.mix else f'step_{step:06d}',
            rows,
            task=task.replace(turn_limit=np.int32(played.horizon)),
            tokenizer=run.tokenizer,
            streams=listed.world_stream,
            key=played.key,
            replies=hosts.said(
                run,
                world,
                workdir / hosts.log_name(hosts.of_world(run.config, 'replies', world)),
                listed.token_stream,
                step=step,
                split='train',
            ),
            group_size=run.config.rollout.group_size,
            title=title,
            extras=row_extras,
            limit=pages.PAGE_EPISODES,
            about=about.of_run(run.config_dict, sys.argv),
        )
