"""What a run reports of itself: its curves while it trains, and a summary at its end."""

import collections
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.hosts.players import reference_success as reference_on_hosts
from agentrl_jax.envs.reference import reference_success
from agentrl_jax.machine import files
from agentrl_jax.records import about, plots, run_log
from agentrl_jax.records.series import Panel, points
from agentrl_jax.text.conversation import HostTask

REFERENCE_FILE = run_log.REFERENCE_FILE
PANELS = ('eval/success', 'group/return_std', 'policy/entropy', 'rollout/valid_format')
FIRST_S = 20.0  # of a start, after which curves are drawn for the first time
SHARE = 0.02  # of the time of a run that drawing may take


def reference(task: Any, levels: int | None = None) -> dict[str, float]:
    """Success of random play and of the best player on the pool of a task, in all its trials.

    levels: how many of it are played, from the first on; None: all. Nothing of worlds on hosts that
    nobody else plays, or not quickly.
    """
    turns = task.agent.acting_turns(task.max_turns)
    if isinstance(task, HostTask) and not task.env.quick:
        return {}
    count = task.env.num_levels(task.env_params)

    def played(x):
        return x[:levels] if np.shape(x)[:1] == (count,) else x

    env_params = jax.tree.map(played, jax.device_get(task.env_params))
    if isinstance(task, HostTask):
        return reference_on_hosts(task.env, env_params, turns, trials=task.agent.trials)
    env_params = jax.tree.map(jnp.asarray, env_params)
    actions = min(task.max_actions_per_episode, turns * task.max_actions_per_turn)
    return reference_success(task.env, env_params, actions, trials=task.agent.trials)


def write_reference(
    workdir: Path, pools: Mapping[str, Any], worlds: int = 1, levels: int | None = None
) -> None:
    """Keeps the references of pools (tasks by the prefixes of their metrics) in the workdir.

    levels: as of reference. Without a prefix: the mean over the first `worlds` pools, which are
    those of the worlds that the run trains on; it lacks what one of them lacks.
    """
    found = {prefix: reference(task, levels) for prefix, task in pools.items()}
    own = list(found.values())[:worlds]
    names = set.intersection(*map(set, own))
    figures = {name: sum(one[name] for one in own) / worlds for name in names}
    for prefix, figures_of in found.items():
        if prefix != 'eval':
            figures |= {f'{prefix}/{name}': x for name, x in figures_of.items()}
    text = json.dumps(figures, sort_keys=True) + '\n'
    files.write_atomic(Path(workdir) / REFERENCE_FILE, text)


def write_curves(workdir: Path, title: str) -> Path | None:
    """Learning curves of a run as PNG and SVG; the path of the PNG, None before any measurement."""
    workdir = Path(workdir)
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    if not any(points(rows, name, 'step')[0].size for name in PANELS):
        return None
    success = json.loads((workdir / REFERENCE_FILE).read_text(encoding='utf-8'))
    lines = {name: success[name] for name in ('random', 'oracle') if name in success}
    panels = [
        Panel(name, name, {'': [rows]}, lines if name == 'eval/success' else {}) for name in PANELS
    ]
    png, _ = plots.draw(panels, workdir / 'curves', x='step', columns=2, title=title)
    return png


class Curves:
    """The curves of a run that trains, redrawn now and then; on process 0 only.

    They take at most SHARE of the run's time: the duration of one sets when the next is due.
    """

    def __init__(self, workdir: Path, config: Any, *, clock: Callable[[], float] = time.monotonic):
        self._workdir, self._config, self._clock = workdir, config, clock
        self._due = clock() + FIRST_S

    def draw_if_due(self) -> None:
        """Between two steps."""
        if self._clock() >= self._due:
            self.draw()

    def draw(self) -> None:
        if jax.process_index() or not (self._workdir / run_log.METRICS_FILE).exists():
            return
        began = self._clock()
        write_curves(self._workdir, about.title(self._config))
        now = self._clock()
        self._due = now + (now - began) / SHARE


def stopped(workdir: Path, command: str) -> str:
    """The closing words of a run that was asked to stop."""
    step = run_log.newest_checkpoint(workdir)
    if step is None:
        return f'stopped before anything was saved; the same command begins anew: {command}'
    return f'stopped; step {step} is saved, and the same command resumes: {command}'


def finished(workdir: Path, command: str) -> str:
    """The words of a run that is finished when it is started again."""
    rows = run_log.read_metrics(Path(workdir) / run_log.METRICS_FILE)
    step = run_log.finished_step(workdir)
    evaluated = [row for row in rows if 'eval/success' in row]
    success = f', held-out success {_interval(evaluated[-1])}' if evaluated else ''
    return (
        f'{workdir} is finished: step {step}{success}\n'
        f'to train longer: {command} --config.steps={2 * step or 1}'
    )


def summary(workdir: Path, command: str) -> str:
    """The closing words of a run."""
    workdir = Path(workdir)
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    success = json.loads((workdir / REFERENCE_FILE).read_text(encoding='utf-8'))
    evaluated = [row for row in rows if 'eval/success' in row] or [{'step': 0}]
    first, last = evaluated[0], evaluated[-1]
    compiled = max((int(row.get('perf/recompiles', 0)) for row in rows), default=0)
    pages = sorted((workdir / 'rollouts').glob('*.html'))
    return '\n'.join(
        [
            f'held-out success {_interval(first)} at step {first["step"]}'
            f' -> {_interval(last)} at step {last["step"]}',
            f'{players(success)} on the same levels',
            *_others(first, last, success),
            *_training_warnings(rows),
            f'programs compiled after warm-up: {compiled}',
            f'curves      {workdir / "curves.png"} (and .svg)',
            f'rollouts    {pages[-1] if pages else "none saved"}',
            f'checkpoint  {workdir / "checkpoints"}',
            f'resume      {command}',
        ]
    )


def _others(
    first: Mapping[str, float], last: Mapping[str, float], success: dict[str, float]
) -> list[str]:
    """A line for each further pool, of another split or world."""
    ending = '/success'
    return [
        f'{prefix} {_interval(first, prefix)} -> {_interval(last, prefix)}; '
        f'{players(success, f"{prefix}/")}'
        for prefix in (name.removesuffix(ending) for name in last if name.endswith(ending))
        if prefix.startswith('eval_')
    ]


def _training_warnings(rows: list[dict[str, float]]) -> list[str]:
    """Sentences about what did not train, such as skipped steps and faults; none if all did."""
    trained = [row for row in rows if 'update/skipped' in row]
    skipped = sum(row['update/skipped'] for row in trained)
    # A row may have been changed by hand, which is no reason to refuse a run its end
    rows = [collections.defaultdict(float, row) for row in trained]
    empty = sum(row['filter/empty'] for row in rows)
    alike = sum(row['group/zero_std_frac'] == 1 > row['group/all_pass_frac'] for row in rows)
    steps = max(len(rows), 1)
    played = [row for row in rows if row['rollout/env_error'] < 1]
    cut = sum(row['rollout/token_budget_stop'] for row in played) / max(len(played), 1)
    faults = sum(row['rollout/env_error'] for row in rows) / steps
    said = {
        f'{skipped:.0f} optimiser steps were skipped: loss or gradient was not finite': skipped,
        f'{empty:.0f} of {steps} steps kept nothing to train on (filter/empty)': empty,
        f'{alike} of {steps} steps had no group that varied (group/zero_std_frac)': alike,
        f'{100 * cut:.1f} % of episodes were cut by rollout.max_tokens': cut,
        f'{100 * faults:.1f} % of episodes were lost to environment faults': faults,
    }
    return [f'WARNING: {sentence}' for sentence, amount in said.items() if amount > 0]


def players(figures: dict[str, float], prefix: str = '') -> str:
    """What random play and the oracle reach; a world without an expert has no oracle."""
    names = ('random', 'random play'), ('oracle', 'oracle')
    return ', '.join(
        f'{name} {100 * figures[prefix + key]:.1f} %' if prefix + key in figures else f'no {name}'
        for key, name in names
    )


def _interval(row: Mapping[str, float], prefix: str = 'eval') -> str:
    ends = ('', '_low', '_high')
    mean, low, high = (100 * row.get(f'{prefix}/success{end}', math.nan) for end in ends)
    return f'{mean:.1f} % [{low:.1f}, {high:.1f}]'
