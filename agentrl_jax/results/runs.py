"""Runs as the tables read them: config, selected metrics, random play and the oracle.

A run is a folder with metrics.jsonl, reference.json and run.json (written when the run is planned,
{"config": {...}}) or config.json (written by training). A compact folder stores many runs in one
file, runs.jsonl.xz, which is small enough to commit. Its first line has the config fields that all
runs share. Each run follows with a header (name, other fields, reference, columns, number of rows)
and one line per row. Values are rounded in both forms, so both give the same tables.
"""

import collections
import json
import lzma
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, NonNegativeInt
from typing_extensions import TypedDict

from agentrl_jax.machine import files
from agentrl_jax.records import run_log

COMPACT_FILE, RUN_FILE = 'runs.jsonl.xz', 'run.json'
AXES = ('step', 'tokens')  # columns of every run, next to its metrics
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


Row = dict[str, float]  # step, tokens and the metrics that were measured


class Run(NamedTuple):
    """One run; it has no rows before training starts."""

    name: str
    fields: dict[str, Any]  # the resolved config by dotted names
    rows: list[Row]
    reference: dict[str, float]  # success of 'random' play and the 'oracle'; may be empty
    fault: str = ''  # why its figures are in no table; '' = they may be


def load(folders: Iterable[str | os.PathLike], metrics: Iterable[str] = ()) -> list[Run]:
    """All runs in the folders: each a run, a folder of runs, or a compact folder.

    metrics: names to keep in addition to KEPT; a compact folder has the metrics it was written
    with. If versions differ, older runs receive the defaults of later config fields.
    FileNotFoundError names the folders that hold no run.
    """
    kept = tuple(dict.fromkeys([*KEPT, *metrics]))
    found = [(folder, _read_folder(folder, kept)) for folder in map(files.local_path, folders)]
    empty = [str(folder) for folder, runs in found if not runs]
    if empty:
        raise FileNotFoundError(
            f'no runs in {", ".join(empty)}: a run has {RUN_FILE} or {run_log.CONFIG_FILE}, a '
            f'compact folder {COMPACT_FILE}'
        )
    return complete([run for _, runs in found for run in runs])


class Planned(TypedDict):
    config: dict[str, Any]  # run.json or config.json


class Common(TypedDict):
    fields: dict[str, Any]  # first line of a compact folder


class Header(BaseModel):
    """First line of a compact run."""

    name: str
    rows: NonNegativeInt
    fields: dict[str, Any]
    reference: dict[str, float]
    columns: list[str]
    fault: str = ''


def _read_folder(folder: Path, kept: Sequence[str]) -> list[Run]:
    if lines := compact_lines(folder):
        return _read_compact(lines)
    inside = [folder] if _document(folder) or not folder.is_dir() else sorted(folder.iterdir())
    return [_read_run(path, kept) for path in inside if _document(path)]


def complete(runs: Sequence[Run]) -> list[Run]:
    """Runs with all fields that any of them has, as a resumed run would have them.

    Incomplete configs, and configs with removed fields, are unchanged.
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


def compact(runs: Sequence[Run], folder: str | os.PathLike) -> Path:
    """Write runs to folder/runs.jsonl.xz, replacing the runs that were there."""
    folder = files.local_path(folder)
    for path in (folder, *folder.glob('*')):
        if _document(path):
            raise ValueError(f'{path} is a run: name a folder without runs last')
    counts = collections.Counter(run.name for run in runs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f'several runs are named {", ".join(twice)}: rename their folders')
    common = _common_fields(runs)
    lines = [json.dumps({'fields': common}, sort_keys=True)]
    for run in runs:
        fields = {name: value for name, value in run.fields.items() if name not in common}
        measured = {name for row in run.rows for name in row}
        columns = [*AXES, *sorted(measured - set(AXES))]
        header = {'name': run.name, 'rows': len(run.rows), 'columns': columns}
        header |= {'fields': fields, 'reference': run.reference}
        header |= {'fault': run.fault} if run.fault else {}
        lines.append(json.dumps(header, sort_keys=True))
        for row in run.rows:
            lines.append(json.dumps([run_log.plain(row.get(name)) for name in columns]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / COMPACT_FILE
    with files.replacing(path) as partial:
        partial.write_bytes(lzma.compress('\n'.join([*lines, '']).encode()))
    return path


def _document(folder: Path) -> Path | None:
    """The file with the config of a run; None if the folder is no run."""
    named = (folder / RUN_FILE, folder / run_log.CONFIG_FILE)
    return next((path for path in named if path.exists()), None)


def _read_run(folder: Path, kept: Sequence[str]) -> Run:
    """A ValueError names the file that cannot be read, and why."""
    path = _document(folder)
    reference = folder / run_log.REFERENCE_FILE
    finished = run_log.finished_step(folder)
    promised = max(run_log.newest_checkpoint(folder) or 0, -1 if finished is None else finished + 1)
    document = files.read_as(Planned, files.read_json(path), path)
    try:
        fields = flatten(run_log.redact(document['config']))
    except RecursionError as error:
        raise ValueError(f'{path}: JSON that is too deep to read') from error
    success = files.read_json(reference) if reference.exists() else {}
    success = files.read_as(dict[str, float], success, reference)
    rows = _axes_and_metrics(run_log.read_metrics(folder / run_log.METRICS_FILE), kept)
    return Run(
        name=folder.resolve().name,
        fields=_checked_fields(fields, path),
        rows=rows,
        reference={name: rounded(value) for name, value in success.items()},
        fault=find_fault(rows, promised),
    )


Lines = list[tuple[Path, int, Any]]  # file, number and JSON value of each line


def compact_lines(folder: Path) -> Lines:
    """Return the lines of a compact folder; [] if it is none."""
    path = folder / COMPACT_FILE
    if not path.is_file():
        return []
    try:
        lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: not a file of compact runs: {error}') from error
    return [(path, n, files.parse_json(line, str(path), n)) for n, line in enumerate(lines, 1)]


def _read_compact(lines: Lines) -> list[Run]:
    path, _, first = lines[0]
    common, runs, at = files.read_as(Common, first, path)['fields'], [], 1
    while at < len(lines):
        path, _, first = lines[at]
        header = files.read_as(Header, first, path)
        table = lines[at + 1 : at + 1 + header.rows]
        if len(table) < header.rows:
            raise ValueError(
                f'{path}: {header.rows - len(table)} rows of {header.name} are missing'
            )
        runs.append(_compact_run(header, table, common))
        at += 1 + header.rows
    return runs


def _compact_run(header: Header, table: Lines, common: Mapping[str, Any]) -> Run:
    rows = []
    for path, number, values in table:
        if not isinstance(values, list) or len(values) != len(header.columns):
            raise ValueError(f'{path}, line {number}: {len(header.columns)} values are expected')
        pairs = zip(header.columns, values, strict=True)
        row = {name: run_log.to_number(value) for name, value in pairs if value is not None}
        wrong = [name for name, value in row.items() if value is None]
        if wrong or not isinstance(row.get('step'), int) or row['step'] < 0:
            raise ValueError(f'{path}, line {number}: {(wrong or ["step"])[0]!r} is not a number')
        rows.append(row)
    fields = dict(sorted((common | header.fields).items()))
    fields = _checked_fields(fields, table[0][0] if table else header.name)
    fault = header.fault or find_fault(rows, 0)
    return Run(header.name, fields, rows, header.reference, fault)


def _checked_fields(fields: dict[str, Any], path: Path | str) -> dict[str, Any]:
    """The config of a run; what every table reads of it has the type that it needs."""
    if 'steps' in fields and type(fields['steps']) is not int:
        raise ValueError(f'{path}: steps={fields["steps"]!r} is not an integer')
    if isinstance(fields.get('seed'), list | dict):
        raise ValueError(f'{path}: seed={fields["seed"]!r} is not a number')
    return fields


def find_fault(rows: Sequence[Mapping[str, float]], promised: int) -> str:
    """Why a run is in no table: rows that are missing, or updates that changed nothing; '' if none.

    promised: rows that must be there, by the checkpoints and the end of the run. A row of an update
    whose parts were all skipped has a gradient norm of 0 or nan. A run is dead if at least half of
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
    """Rows of metrics.jsonl with the tokens sampled before each step.

    Validation is the first part of a step, so it measures the policy of the steps before. Tokens
    are known as long as every row has a number.
    """
    found, tokens = [], {'tokens': 0}
    for row in rows:
        known = {'step': row['step'], **tokens}
        found.append(known | {name: rounded(row[name]) for name in kept if name in row})
        sampled = row.get('perf/tokens_per_s', math.nan) * row.get('time/step_s', math.nan)
        finite = math.isfinite(sampled)
        tokens = {name: count + round(sampled) for name, count in tokens.items() if finite}
    return found


def _common_fields(runs: Sequence[Run]) -> dict[str, Any]:
    """Fields that all runs have, equal as JSON: 1, 1.0 and True are three values."""
    items = [{(name, json.dumps(x)) for name, x in run.fields.items()} for run in runs]
    shared = {name for name, _ in set.intersection(*items)}
    return {name: value for name, value in runs[0].fields.items() if name in shared}
