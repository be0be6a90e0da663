"""What a run does about its alarms: reports them, stops, or rolls back and resumes with new seeds.

A roll back is written down before anything is removed, so that a run that is killed at any moment
and started again does the same. What happened stays: the abandoned rows of metrics.jsonl are copied
to metrics_abandoned_<n>.jsonl, and roll_backs.json says when, why and to where.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.machine import checkpoint, files, processes
from agentrl_jax.measure import collapse
from agentrl_jax.records import run_log
from agentrl_jax.run.params import BEST_FOLDER


def watch(
    history: list[dict[str, float]], settings: Mapping[str, Any], *, used: int
) -> dict[str, collapse.Alarm]:
    """What the signals report of the rows so far; the newest row gets its alarm/ metrics."""
    newest = history[-1]
    if 'collapse/mi_token' in newest:
        newest['collapse/mi_z_ema'] = collapse.smoothed_z(history)
    alarms = collapse.judge_all(history, settings)
    newest['alarm/level'] = collapse.worst_level(alarms)
    newest['alarm/roll_backs'] = used
    return alarms


def react(
    alarms: Mapping[str, collapse.Alarm],
    settings: Mapping[str, Any],
    step: int,
    workdir: Path,
    checkpoints: checkpoint.Checkpoints,
    *,
    used: int,
    say: Callable[[str], None],
) -> str:
    """Reports what is new, does what the config asks for: '', 'stop' or 'roll_back' (recorded)."""
    for alarm in alarms.values():
        if alarm.news:
            say(f'step {step}: {alarm.reason}')
    action, name = reaction(alarms, settings, used=used)
    if not action:
        return ''
    checkpoint.wait(checkpoints)
    to_step = target(checkpoint.steps(checkpoints.directory), alarms[name].since)
    if action == 'stop' or to_step is None:
        say(f'step {step}: the run ends here ({name})')
        return 'stop'
    say(f'step {step}: back to step {to_step} ({name})')
    if jax.process_index() == 0:
        record(workdir, at_step=step, to_step=to_step, signal=name, reason=alarms[name].reason)
    return 'roll_back'


def reaction(
    alarms: Mapping[str, collapse.Alarm], settings: Mapping[str, Any], *, used: int
) -> tuple[str, str]:
    """('', '') or ('stop' or 'roll_back', name of the signal); used: roll backs so far.

    A stop goes before a roll back. When all roll backs are used, the next one is a stop.
    """
    raised = [name for name, alarm in alarms.items() if alarm.level == 'alarm']
    for action in ('stop', 'roll_back'):
        for name in raised:
            if settings[name]['action'] == action:
                spent = action == 'roll_back' and used >= settings['max_roll_backs']
                return 'stop' if spent else action, name
    return '', ''


def target(steps: Sequence[int], since: int) -> int | None:
    """The newest saved step before the step in which the trouble began, None if there is none.

    Not that step itself: its rollout, which was bad already, was played by the policy saved there.
    """
    return max((step for step in steps if step < since), default=None)


def record(workdir: Path, *, at_step: int, to_step: int, signal: str, reason: str) -> None:
    """Keeps the abandoned rows, then writes the roll back down: from here on it has happened."""
    past = run_log.read_roll_backs(workdir)
    rows = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    lost = ''.join(run_log.json_line(row) for row in rows if row['step'] >= to_step)
    files.write_atomic(workdir / run_log.ABANDONED_FILE.format(len(past) + 1), lost)
    past.append({'at_step': at_step, 'to_step': to_step, 'signal': signal, 'reason': reason})
    files.write_atomic(workdir / run_log.ROLL_BACKS_FILE, json.dumps(past, indent=2) + '\n')


def settle(workdir: Path) -> int:
    """Removes checkpoints that a roll back has abandoned; how many roll backs there were."""
    processes.barrier('roll back written')
    past = run_log.read_roll_backs(workdir)
    if past and jax.process_index() == 0:
        for name in (checkpoint.FOLDER, f'{BEST_FOLDER}/{checkpoint.FOLDER}'):
            _remove_abandoned(workdir / name, past)
    processes.barrier('abandoned checkpoints removed')
    return len(past)


def _remove_abandoned(folder: Path, past: Sequence[Mapping[str, Any]]) -> None:
    for step in checkpoint.steps(folder):
        try:
            played_after = checkpoint.read_extra(folder, step=step)['roll_backs']
        except checkpoint.Damaged:  # said where it is opened
            continue
        if any(step > later['to_step'] for later in past[played_after:]):
            checkpoint.remove(folder / str(step))
