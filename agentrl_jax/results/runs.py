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
NOTES = ('fault', 'machine')  # texts about a run, kept where there are any
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
    'policy/kl_old_k3',
    'collapse/mi_share',
    'update/skipped',
)


WHOLE = {'algorithm', 'env.name', 'seed', 'steps'}  # what a run's config has in any version


Row = dict[str, float]  # step, tokens, seconds and the metrics that were measured


class Run(NamedTuple):
    """One run; no rows when it was planned and has not begun."""

    name: str
    fields: dict[str, Any]  # the resolved config by dotted names
    rows: list[Row]
    reference: dict[str, float]  # success of 'random' play and the 'oracle'; may be empty
    fault: str = ''  # why its figures are in no table; '' = they may be
    machine: str = ''  # hardware it was trained on, 'a; b' if on several; '' = not noted


def load(folders: Iterable[str | os.PathLike], metrics: Iterable[str] = ()) -> list[Run]:
    """All runs in the folders: each a run, a folder of runs, or a compact folder.

    metrics: names to keep beside KEPT; a compact folder has those that it was made with. Runs of an
    older version beside those of a newer one have the fields that came later, at what they do.
    FileNotFoundError names the folders that hold no run.
    """
    kept = tuple(dict.fromkeys([*KEPT, *metrics]))
    found = [(folder, _read_folder(folder, kept)) for folder in map(files.local_path, folders)]
    empty = [str(folder) for folder, runs in found if not runs]
    if empty:
        raise FileNotFoundError(
            f'no runs in {", ".join(empty)}: a run has {RUN_FILE} or {run_log.CONFIG_FILE}, a '
            f'compact folder {COMMON_FILE}'
        )
    return complete([run for _, runs in found for run in runs])


def _read_folder(folder: Path, kept: Sequence[str]) -> list[Run]:
    if (folder / COMMON_FILE).is_file():
        return _read_compact(folder)
    if _document(folder):
        return [_read_run(folder, kept)]
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_read_run(path, kept) for path in inside if _document(path)]


def complete(runs: Sequence[Run]) -> list[Run]:
    """Runs with all fields that any of them has, as a resumed run would have them.

    What is no whole config, or one with fields that are gone, stays as it is.
    """
    names = set().union(*(run.fields for run in runs))
    return [run if names <= run.fields.keys() else _with_later(run, names) for run in runs]


def _with_later(run: Run, names: set[str]) -> Run:
    from flax import traverse_util  # here: both load JAX, which few tables need

    from agentrl_jax.run import config, migration

    if not WHOLE <= run.fields.keys():
        return run
    try:
        tree = traverse_util.unflatten_dict(run.fields, sep='.')
        full = flatten(config.as_json(config.effective(migration.migrate(tree))))
    except (ValueError, TypeError, AttributeError, OverflowError):  # a file may hold any values
        return run
    later = {name: full[name] for name in sorted(names - run.fields.keys()) if name in full}
    return run._replace(fields=dict(sorted((run.fields | later).items())))


def compact(runs: Sequence[Run], folder: str | os.PathLike) -> list[Path]:
    """Writes runs as a compact folder, replacing what was compacted there before."""
    folder = files.local_path(folder)
    whole = [path for path in (folder, *folder.glob('*')) if _document(path)]
    if whole:
        raise ValueError(
            f'{whole[0]} is a run: runs are compacted to a folder of their own, which is named last'
        )
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
        header |= {name: text for name in NOTES if (text := getattr(run, name))}
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
    return next((path for path in named if path.exists()), None)


def _read_run(folder: Path, kept: Sequence[str]) -> Run:
    """A ValueError names the file that cannot be read, and why."""
    path = _document(folder)
    config = _object(files.read_json(path), path, 'config')
    reference, noted = folder / run_log.REFERENCE_FILE, folder / run_log.CONFIG_FILE
    success = files.read_json(reference) if reference.exists() else {}
    machine = files.read_json(noted) if noted.exists() else {}
    machine = machine['machine'] if isinstance(machine, dict) and 'machine' in machine else ''
    measured = run_log.read_metrics(folder / run_log.METRICS_FILE)
    finished = run_log.finished_step(folder)
    saved = run_log.newest_checkpoint(folder)
    promised = max(0 if saved is None else saved, 0 if finished is None else finished + 1)
    try:
        fields = flatten(run_log.redact(config))
    except RecursionError as error:
        raise ValueError(f'{path}: JSON that is too deep to read') from error
    rows = _axes_and_metrics(measured, kept)
    return Run(
        name=folder.resolve().name,
        fields=_checked_fields(fields, path),
        rows=rows,
        reference={name: rounded(value) for name, value in _numbers(success, reference).items()},
        fault=find_fault(rows, promised),
        machine=machine if isinstance(machine, str) else '',
    )


def _read_compact(folder: Path) -> list[Run]:
    common_file = folder / COMMON_FILE
    common = _object(files.read_json(common_file), common_file, 'fields')
    return [_read_compact_run(path, common) for path in sorted(folder.glob('*.jsonl'))]


def _read_compact_run(path: Path, common: Mapping[str, Any]) -> Run:
    lines = files.read_text(path).splitlines()
    header, *table = [
        files.parse_json(line, str(path), number) for number, line in enumerate(lines, 1)
    ] or [None]
    fields = common | _object(header, path, 'fields')
    reference = _numbers(_object(header, path, 'reference'), path)
    columns = header.get('columns')
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ValueError(f'{path}: the first line needs "columns", a list of names')
    rows = []
    for number, values in enumerate(table, 2):
        if not isinstance(values, list) or len(values) != len(columns):
            raise ValueError(f'{path}: every line after the first needs {len(columns)} values')
        row = {
            name: run_log.to_number(value)
            for name, value in zip(columns, values, strict=True)
            if value is not None
        }
        wrong = [name for name, value in row.items() if value is None]
        if wrong or 'step' not in row or not isinstance(row['step'], int) or row['step'] < 0:
            raise ValueError(f'{path}, line {number}: {(wrong or ["step"])[0]!r} is no number')
        rows.append(row)
    notes = {name: header.get(name, '') for name in NOTES}
    if not all(isinstance(text, str) for text in notes.values()):
        raise ValueError(f'{path}: {" and ".join(NOTES)} must be texts')
    notes['fault'] = notes['fault'] or find_fault(rows, 0)
    fields = _checked_fields(dict(sorted(fields.items())), path)
    return Run(path.stem, fields, rows, reference, **notes)


def _object(value: Any, path: Path, name: str) -> dict[str, Any]:
    """The object under a name in the object of a file."""
    found = value[name] if isinstance(value, dict) and name in value else None
    if not isinstance(found, dict):
        raise ValueError(f'{path}: an object with "{name}", itself an object, is expected')
    return found


def _numbers(value: Any, path: Path) -> dict[str, float]:
    numbers = {k: run_log.to_number(x) for k, x in value.items()} if isinstance(value, dict) else {}
    if not isinstance(value, dict) or None in numbers.values():
        raise ValueError(f'{path}: success of random play and oracle must be numbers')
    return numbers


def _checked_fields(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of a run; what every table reads of it has the type that it needs."""
    if 'steps' in fields and type(fields['steps']) is not int:
        raise ValueError(f'{path}: steps={fields["steps"]!r} is no whole number')
    if 'seed' in fields and isinstance(fields['seed'], list | dict):
        raise ValueError(f'{path}: seed={fields["seed"]!r} is no number')
    return fields


def find_fault(rows: Sequence[Mapping[str, float]], promised: int) -> str:
    """Why a run is in no table: rows that are missing, or updates that changed nothing; '' if none.

    promised: rows that must be there, by the checkpoints and the end of the run. A row of an update
    that was skipped as a whole has a gradient norm of 0 or nan. A run is dead when at least half of
    its updates, up to the last one, were skipped.
    """
    steps = [row['step'] for row in rows]
    lacking = run_log.gaps(set(steps), max([promised, *(step + 1 for step in steps)]))
    if lacking:
        return f'the rows of steps {lacking} are missing'
    if len(set(steps)) < len(steps):
        return 'several rows are of one step'
    updates = [row for row in rows if 'update/skipped' in row]
    streak = 0
    for row in reversed(updates):
        norm = row.get('policy/grad_norm', 0.0)
        if not row['update/skipped'] > 0 or norm > 0:
            break
        streak += 1
    if streak and 2 * streak >= len(updates):
        of_them = 'all' if streak == len(updates) else f'the last {streak} of'
        return f'{of_them} its {len(updates)} updates were skipped: nothing was trained'
    return ''


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
        seconds, tokens = row['time_s'], _sum_of([tokens, _sampled(row)])
    return found


def _sampled(row: Mapping[str, float]) -> int | None:
    if not {'perf/tokens_per_s', 'time/step_s'} <= row.keys():
        return None
    sampled = row['perf/tokens_per_s'] * row['time/step_s']
    return round(sampled) if math.isfinite(sampled) else None


def _sum_of(numbers: Sequence[int | None]) -> int | None:
    return None if None in numbers else sum(numbers)


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
