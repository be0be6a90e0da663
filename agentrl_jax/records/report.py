"""Reports of a run: curves and a summary at its end."""

import collections
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.envs.hosts.players import reference_success as reference_on_hosts
from agentrl_jax.envs.reference import reference_success
from agentrl_jax.machine import files
from agentrl_jax.records import plots, run_log
from agentrl_jax.records.series import Panel, points
from agentrl_jax.text.conversation import HostTask

PANELS = ('eval/success', 'group/return_std', 'policy/entropy', 'rollout/valid_format')


def reference(task: Any, levels: int | None = None) -> dict[str, float]:
    """Success of random play and of the oracle on a task's pool, in all of its trials.

    levels: number of levels to play, starting with the first; None: all. Returns {} for
    environments on hosts that are slow.
    """
    turns = task.agent.acting_turns(task.max_turns)
    if isinstance(task, HostTask) and not task.env.quick:
        return {}
    count = task.env.num_levels(task.env_params)

    def first_levels(x):
        return x[:levels] if np.shape(x)[:1] == (count,) else x

    env_params = jax.tree.map(first_levels, jax.device_get(task.env_params))
    if isinstance(task, HostTask):
        return reference_on_hosts(task.env, env_params, turns, trials=task.agent.trials)
    env_params = jax.tree.map(jnp.asarray, env_params)
    actions = min(task.max_actions_per_episode, turns * task.max_actions_per_turn)
    return reference_success(task.env, env_params, actions, trials=task.agent.trials)


def write_reference(workdir: Path, pools: Mapping[str, Any], levels: int | None = None) -> None:
    """Save the references of pools (tasks by the prefix of their metrics) in the workdir.

    levels: see reference. Figures without a prefix are means over the pools. A figure that one of
    them lacks is omitted.
    """
    by_prefix = {prefix: reference(task, levels) for prefix, task in pools.items()}
    names = set.intersection(*map(set, by_prefix.values()))
    figures = {name: sum(x[name] for x in by_prefix.values()) / len(pools) for name in names}
    for prefix, figures_of in by_prefix.items():
        if prefix != 'eval':
            figures |= {f'{prefix}/{name}': x for name, x in figures_of.items()}
    text = json.dumps(figures, sort_keys=True) + '\n'
    files.write_atomic(Path(workdir) / run_log.REFERENCE_FILE, text)


def write_curves(workdir: Path, title: str) -> Path | None:
    """Write learning curves as PNG and SVG; return the PNG's path, None before any measurement."""
    workdir = Path(workdir)
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    if not any(points(rows, name, 'step')[0].size for name in PANELS):
        return None
    success = json.loads((workdir / run_log.REFERENCE_FILE).read_text(encoding='utf-8'))
    lines = {name: success[name] for name in ('random', 'oracle') if name in success}
    panels = [
        Panel(name, name, {'': [rows]}, lines if name == 'eval/success' else {}) for name in PANELS
    ]
    png, _ = plots.draw(panels, workdir / 'curves', x='step', columns=2, title=title)
    return png


def stopped(workdir: Path, command: str) -> str:
    """The final message of an interrupted run."""
    step = run_log.newest_checkpoint(workdir)
    if step is None:
        return f'stopped before anything was saved; run the same command to start over: {command}'
    return f'stopped; step {step} is saved. Run the same command to resume: {command}'


def finished(workdir: Path, command: str) -> str:
    """The message if a finished run is started again."""
    rows = run_log.read_metrics(Path(workdir) / run_log.METRICS_FILE)
    step = run_log.finished_step(workdir)
    evaluated = [row for row in rows if 'eval/success' in row]
    success = f', held-out success {interval(evaluated[-1])}' if evaluated else ''
    return (
        f'{workdir} is finished: step {step}{success}\n'
        f'to train longer: {command} --config.steps={2 * step or 1}'
    )


def summary(workdir: Path, command: str) -> str:
    """The final message of a run."""
    workdir = Path(workdir)
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    success = json.loads((workdir / run_log.REFERENCE_FILE).read_text(encoding='utf-8'))
    evaluated = [row for row in rows if 'eval/success' in row] or [{'step': 0}]
    first, last = evaluated[0], evaluated[-1]
    compiled = max((int(row.get('perf/recompiles', 0)) for row in rows), default=0)
    pages = sorted((workdir / 'rollouts').glob('*.html'))
    return '\n'.join(
        [
            f'held-out success {interval(first)} at step {first["step"]}'
            f' -> {interval(last)} at step {last["step"]}',
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
    """One line for each environment of a mixture."""
    suffix = '/success'
    return [
        f'{prefix} {interval(first, prefix)} -> {interval(last, prefix)}; '
        f'{players(success, f"{prefix}/")}'
        for prefix in (name.removesuffix(suffix) for name in last if name.endswith(suffix))
        if prefix.startswith('eval_')
    ]


def _training_warnings(rows: list[dict[str, float]]) -> list[str]:
    """Warnings about lost training, such as skipped steps and faults."""
    trained = [row for row in rows if 'update/skipped' in row]
    skipped = sum(row['update/skipped'] for row in trained)
    # Rows may have been edited by hand: missing values must not fail the report.
    rows = [collections.defaultdict(float, row) for row in trained]
    empty = sum(row['filter/empty'] for row in rows)
    constant = sum(row['group/zero_std_frac'] == 1 > row['group/all_pass_frac'] for row in rows)
    steps = max(len(rows), 1)
    healthy = [row for row in rows if row['rollout/env_error'] < 1]
    cut = sum(row['rollout/token_budget_stop'] for row in healthy) / max(len(healthy), 1)
    faults = sum(row['rollout/env_error'] for row in rows) / steps
    warnings = {
        f'{skipped:.0f} optimiser steps were skipped: loss or gradient was not finite': skipped,
        f'{empty:.0f} of {steps} steps kept nothing to train on (filter/empty)': empty,
        f'{constant} of {steps} steps had no group that varied (group/zero_std_frac)': constant,
        f'{100 * cut:.1f} % of episodes were cut by rollout.max_tokens': cut,
        f'{100 * faults:.1f} % of episodes were lost to environment faults': faults,
    }
    return [f'warning: {sentence}' for sentence, amount in warnings.items() if amount > 0]


def players(figures: dict[str, float], prefix: str = '') -> str:
    """Success of random play and the oracle; environments without an expert have no oracle."""
    names = ('random', 'random play'), ('oracle', 'oracle')
    return ', '.join(
        f'{name} {100 * figures[prefix + key]:.1f} %' if prefix + key in figures else f'no {name}'
        for key, name in names
    )


def interval(row: Mapping[str, float], prefix: str = 'eval') -> str:
    ends = ('', '_low', '_high')
    mean, low, high = (100 * row.get(f'{prefix}/success{end}', math.nan) for end in ends)
    return f'{mean:.1f} % [{low:.1f}, {high:.1f}]'
