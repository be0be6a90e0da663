"""Runs as tables see them: config, a few metrics, random play and oracle; whole or compacted.

A run is a folder with metrics.jsonl, reference.json and run.json (written when the run is planned,
{"config": {...}}) or config.json (written by training). A compact folder holds the same numbers in
a form to be committed: common.json with the config fields that all runs share, and one <run>.jsonl
each, whose first line has the other fields, the reference and the names of the columns that follow.
Both are rounded in the same way when they are read, so both give the same tables.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentrl_jax.machine import files
from agentrl_jax.records import run_log

COMMON_FILE, RUN_FILE = 'common.json', 'run.json'
AXES = ('step', 'tokens', 'seconds')  # columns of every run, beside its metrics
DIGITS = 6  # significant digits that are kept
KEPT = (  # metrics that are always kept, where a run has them
    'eval/success',
    'eval/success_low',
    'eval/success_high',
    'eval/return',
    'eval/valid_format',
    'rollout/success',
    'rollout/valid_format',
    'group/return_std',
    'policy/entropy',
    'policy/grad_norm',
)


class Run(NamedTuple):
    """One run; no rows when it was planned and has not begun."""

    name: str
    fields: dict[str, Any]  # the resolved config by dotted names
    rows: list[dict[str, float]]  # step, tokens, seconds and the metrics that were measured
    reference: dict[str, float]  # success of 'random' play and the 'oracle'; may be empty


def load(folders: Iterable[str | os.PathLike], metrics: Iterable[str] = ()) -> list[Run]:
    """All runs in the folders: each a run, a folder of runs, or a compact folder.

    metrics: names to keep beside KEPT; a compact folder has those that it was made with.
    """
    kept = tuple(dict.fromkeys([*KEPT, *metrics]))
    runs = []
    for folder in map(Path, folders):
        if (folder / COMMON_FILE).is_file():
            runs += _read_compact(folder)
        elif _document(folder):
            runs.append(_read_run(folder, kept))
        elif folder.is_dir():
            runs += [_read_run(path, kept) for path in sorted(folder.iterdir()) if _document(path)]
    if not runs:
        listed = ', '.join(map(str, folders))
        raise FileNotFoundError(
            f'no runs in {listed}: a run has {RUN_FILE} or {run_log.CONFIG_FILE}, a compact folder '
            f'{COMMON_FILE}'
        )
    return runs


def compact(runs: Sequence[Run], folder: str | os.PathLike) -> list[Path]:
    """Writes runs as a compact folder, replacing what was compacted there before."""
    folder = Path(folder)
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f'several runs are named {", ".join(twice)}: rename their folders')
    stale = set(folder.glob('*.jsonl'))
    if stale and not (folder / COMMON_FILE).exists():
        raise ValueError(f'{folder} holds .jsonl files that are not compacted runs')
    folder.mkdir(parents=True, exist_ok=True)
    common = _common_fields(runs)
    text = json.dumps({'fields': common}, indent=1, sort_keys=True) + '\n'
    files.write_atomic(folder / COMMON_FILE, text)
    written = []
    for run in runs:
        fields = {name: value for name, value in run.fields.items() if name not in common}
        measured = {name for row in run.rows for name in row}
        columns = [*AXES, *sorted(measured - set(AXES))]
        header = {'fields': fields, 'reference': run.reference, 'columns': columns}
        lines = [json.dumps(header, sort_keys=True)]
        for row in run.rows:
            values = [_plain(row[name]) if name in row else None for name in columns]
            lines.append(json.dumps(values, allow_nan=False))
        path = folder / f'{run.name}.jsonl'
        files.write_atomic(path, '\n'.join(lines) + '\n')
        written.append(path)
    for path in stale - set(written):
        path.unlink()
    return written


def _document(folder: Path) -> Path | None:
    """The file that says what a run is; None where there is no run."""
    named = (folder / RUN_FILE, folder / run_log.CONFIG_FILE)
    return next((path for path in named if path.is_file()), None)


def _read_run(folder: Path, kept: Sequence[str]) -> Run:
    path = _document(folder)
    document = json.loads(path.read_text(encoding='utf-8'))
    if not isinstance(document, dict) or 'config' not in document:
        raise ValueError(f'{path}: an object with "config" is expected')
    reference = folder / run_log.REFERENCE_FILE
    success = json.loads(reference.read_text(encoding='utf-8')) if reference.is_file() else {}
    return Run(
        name=folder.resolve().name,
        fields=flatten(run_log.redact(document['config'])),
        rows=_axes_and_metrics(run_log.read_metrics(folder / run_log.METRICS_FILE), kept),
        reference={name: rounded(value) for name, value in success.items()},
    )


def _read_compact(folder: Path) -> list[Run]:
    common = json.loads((folder / COMMON_FILE).read_text(encoding='utf-8'))['fields']
    runs = []
    for path in sorted(folder.glob('*.jsonl')):
        lines = path.read_text(encoding='utf-8').splitlines()
        header, *table = [json.loads(line) for line in lines]
        columns = header['columns']
        if any(len(values) != len(columns) for values in table):
            raise ValueError(f'{path}: every line after the first needs {len(columns)} values')
        rows = [
            {
                name: _number(value)
                for name, value in zip(columns, values, strict=True)
                if value is not None
            }
            for values in table
        ]
        fields = common | header['fields']
        runs.append(Run(path.stem, dict(sorted(fields.items())), rows, header['reference']))
    return runs


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'env': {'name': 'bandit'}} as {'env.name': 'bandit'}; absolute paths lose their folders."""
    flat = {}
    for name, value in sorted(tree.items()):
        if isinstance(value, Mapping):
            flat |= flatten(value, f'{prefix}{name}.')
        elif isinstance(value, str) and Path(value).is_absolute():
            flat[prefix + name] = Path(value).name  # where a machine keeps its models is not ours
        else:
            flat[prefix + name] = value
    return dict(sorted(flat.items()))


def rounded(value: float) -> float:
    """A number to 6 significant digits; integers, nan and inf stay."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    return float(f'{value:.{DIGITS}g}')


def _axes_and_metrics(rows: Sequence[Mapping[str, float]], kept: Sequence[str]) -> list[dict]:
    """Rows of metrics.jsonl with the tokens sampled and the seconds spent before each step.

    Validation comes first in a step, so what it finds was reached with what came before. Tokens are
    known as long as every row says how many were sampled.
    """
    found, tokens, seconds = [], 0, 0.0
    for row in rows:
        known = {'step': row['step'], 'tokens': tokens, 'seconds': rounded(seconds)}
        if tokens is None:
            del known['tokens']
        known |= {name: rounded(row[name]) for name in kept if name in row}
        found.append(known)
        seconds = row['time_s']
        if tokens is None or not {'perf/tokens_per_s', 'time/step_s'} <= row.keys():
            tokens = None
        else:
            tokens += round(row['perf/tokens_per_s'] * row['time/step_s'])
    return found


def _common_fields(runs: Sequence[Run]) -> dict[str, Any]:
    first, *others = [run.fields for run in runs]
    return {
        name: value
        for name, value in first.items()
        if all(name in fields and _same(fields[name], value) for fields in others)
    }


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 and 1.0 and True are three values."""
    return json.dumps(a) == json.dumps(b)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _number(value: float | str) -> float:
    return run_log.NOT_FINITE[value] if isinstance(value, str) else value
