"""What a table shows, and which runs go into which of its cells."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentrl_jax.records.method import method
from agentrl_jax.results.runs import AXES, Run
from agentrl_jax.run import command

SUCCESS = 'eval/success'  # random play and the oracle are known of it only
METHOD = 'method'  # may take the place of a config field in rows, columns and where
OVERALL = 'all'  # the column over all others
PLACES = 'last', 'last-three', 'best-validation', 'equal-tokens', 'area'
LAST, LAST_THREE, BEST, EQUAL_TOKENS, AREA = PLACES
LEAVE_OUT, COUNT = 'leave-out', 'count'
FREE = ('log', 'checkpoint', 'mesh')  # sections of a config that do not change what a run finds
LISTS = ('rows', 'cols', 'also', 'pooled', 'signals', 'clones')


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a table shows; the keys of a table in an experiment's table.json."""

    rows: tuple[str, ...]  # config fields whose values name a row
    cols: tuple[str, ...] = ()  # ... and a column
    metric: str = SUCCESS
    at: str = LAST  # last, last-three (mean of the last three validations), best-validation (the
    # highest eval/success), a step, equal-tokens (where the run of the column with the fewest
    # sampled tokens ends, between two validations) or area (mean over the tokens up to there)
    also: tuple[str, ...] = ('eval/valid_format',)  # metrics beside it, where runs have them
    baseline: str = ''  # label of the row that others are compared with
    margin: float = 0.0  # differences from it within +- this, in units of the metric, are the same
    where: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # runs to take
    pooled: tuple[str, ...] = ()  # fields beside the seed that may differ within a cell
    unfinished: str = LEAVE_OUT  # or count: take the last validation of runs that did not get there
    seeds: int = 0  # runs a cell should have; 0 = all seeds that any cell has
    overall: bool = False  # one more column over all columns, which are its strata
    signals: tuple[str, ...] = ()  # further metrics to draw
    clones: tuple[str, ...] = ()  # folders of runs of the expert's clones; of an experiment's table
    # names of experiments beside it
    curves: bool = True  # False: draw none, as where another table of the same runs has them
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names to show, in order
    published: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # figures of others, as they printed them: {row: {column: figure}}


def make_spec(given: Mapping[str, Any]) -> Spec:
    """A Spec of plain values, as JSON or flags give them: lists may be texts joined by commas."""
    fields = {field.name for field in dataclasses.fields(Spec)}
    unknown = sorted(set(given) - fields)
    if unknown:
        raise ValueError(f'a table has no {", ".join(unknown)}; it has {", ".join(sorted(fields))}')
    if 'rows' not in given or not given['rows']:
        raise ValueError('a table needs rows, such as --rows=method or --rows=algorithm')
    _check_types(given)
    values = dict(given)
    for name in LISTS:
        if name in values:
            values[name] = split_names(values[name])
    if 'where' in values:
        values['where'] = {name: split_names(x, '|') for name, x in values['where'].items()}
    spec = Spec(**values)
    if spec.at not in PLACES and not re.fullmatch('[0-9]{1,18}', str(spec.at)):
        raise ValueError(f'at={spec.at} must be {", ".join(PLACES)} or a step')
    if spec.unfinished not in (LEAVE_OUT, COUNT):
        raise ValueError(f'unfinished={spec.unfinished} must be {LEAVE_OUT} or {COUNT}')
    if spec.margin and not spec.baseline:
        raise ValueError(f'margin={spec.margin} is of differences from a baseline: name one')
    also = tuple(name for name in spec.also if name != spec.metric)
    return dataclasses.replace(spec, at=str(spec.at), also=also)


def _is_names(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
    return listed or isinstance(value, str)


def _is_table(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(fits, value.values()))


KINDS = {  # what a value must be -> whether one is, and the fields that hold such values
    'a list of names': (_is_names, LISTS),
    'a text': (lambda x: isinstance(x, str), ('metric', 'baseline', 'unfinished')),
    'a text or a step': (lambda x: isinstance(x, str) or type(x) is int, ('at',)),
    'values for names of fields': (_is_table(_is_names), ('where',)),
    'a text for each label': (_is_table(lambda x: isinstance(x, str)), ('labels',)),
    'figures by row and column': (_is_table(lambda x: isinstance(x, Mapping)), ('published',)),
    'a whole number, 0 or more': (lambda x: type(x) is int and x >= 0, ('seeds',)),
    'a number, 0 or more': (lambda x: type(x) in (int, float) and 0 <= x < math.inf, ('margin',)),
    'true or false': (lambda x: isinstance(x, bool), ('overall', 'curves')),
}


def _check_types(given: Mapping[str, Any]) -> None:
    """ValueError for a value whose type a table cannot use."""
    for what, (fits, names) in KINDS.items():
        for name in names:
            if name in given and not fits(given[name]):
                raise ValueError(f'{name}={given[name]!r} must be {what}')


def metrics_of(spec: Spec) -> tuple[str, ...]:
    """The metrics that a table reads."""
    return (spec.metric, *spec.also, *spec.signals)


def split_names(given: str | Iterable[str], separator: str = ',') -> tuple[str, ...]:
    parts = given.split(separator) if isinstance(given, str) else given
    return tuple(part.strip() for part in parts if part.strip())


def show(value: Any) -> str:
    """A config value as a label: 0.25, ppo, True."""
    return f'{value:g}' if isinstance(value, float) else str(value)


def field(run: Run, name: str) -> Any:
    """The value of a config field, or of METHOD: what the config trains with (records.method)."""
    if name == METHOD and name not in run.fields:
        try:
            return method(run.fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f'run {run.name}: its config does not tell its method') from error
    if name not in run.fields:
        near = [known for known in run.fields if known.split('.')[-1] == name.split('.')[-1]]
        other = f'; it has {near}' if near else command.suggestion(name, run.fields)
        raise ValueError(f'run {run.name} has no field {name}{other}')
    return run.fields[name]


def is_finished(run: Run) -> bool:
    return bool(run.rows) and run.rows[-1]['step'] >= field(run, 'steps')


def choose(runs: Sequence[Run], spec: Spec) -> list[Run]:
    taken = [
        run
        for run in runs
        if all(show(field(run, name)) in values for name, values in spec.where.items())
    ]
    if not taken:
        raise ValueError(f'none of {len(runs)} runs has {dict(spec.where)}')
    measured = {name for run in taken for row in run.rows for name in row} - set(AXES)
    for name in (spec.metric, *spec.signals):
        if measured and name not in measured:
            close = command.suggestion(name, measured)
            raise ValueError(f'no run has the metric {name}{close}; there are {sorted(measured)}')
    steps = sorted({row['step'] for run in taken for row in run.rows if spec.metric in row})
    if steps and spec.at not in PLACES and int(spec.at) not in steps:
        raise ValueError(f'no run has {spec.metric} at step {spec.at}, only at {steps}')
    return taken


def _label(run: Run, names: Sequence[str], spec: Spec) -> str:
    text = ', '.join(show(field(run, name)) for name in names)
    return spec.labels[text] if text in spec.labels else text


def group_runs(runs: Sequence[Run], spec: Spec) -> dict[tuple[str, str], tuple[Run, ...]]:
    """Runs by (row, column), in each by seed; a cell must differ in nothing but the seed."""
    for name in spec.pooled:
        if runs and not any(name in run.fields for run in runs):
            raise ValueError(f'pooled={name}: no run has this field')
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        column = _label(run, spec.cols, spec) if spec.cols else spec.metric
        found.setdefault((_label(run, spec.rows, spec), column), []).append(run)
    for (row, column), members in found.items():
        members.sort(key=lambda run: (rank(field(run, 'seed')), run.name))
        differ = _differing(members, {'seed', *spec.pooled})
        if differ:
            raise ValueError(
                f'the runs of {row} / {column} differ in {", ".join(differ)}, not only in their '
                'seeds: add it to the rows or columns, choose runs with where, or name it in pooled'
            )
        seeds = [run.fields['seed'] for run in members]
        twice = [run.name for run in members if seeds.count(run.fields['seed']) > 1]
        if twice and not spec.pooled:
            raise ValueError(f'{row} / {column} has runs of the same config: {", ".join(twice)}')
    return {key: tuple(members) for key, members in found.items()}


def _differing(runs: Sequence[Run], free: set[str]) -> list[str]:
    names = {name for run in runs for name in run.fields if name.split('.')[0] not in FREE}
    values = {
        name: {json.dumps(run.fields[name] if name in run.fields else None) for run in runs}
        for name in names - free
    }
    return sorted(name for name, found in values.items() if len(found) > 1)


def rank(value: Any) -> tuple:
    """Numbers by size, before texts by letter."""
    try:
        return 0, float(str(value)), ''
    except ValueError:
        return 1, 0.0, str(value)


def ordered(labels: set[str], named: Mapping[str, str]) -> list[str]:
    """As in `labels` of the spec; the others after them, part by part, numbers by size."""
    first = [label for label in dict.fromkeys(named.values()) if label in labels]
    rest = sorted(labels - set(first), key=lambda text: [rank(x) for x in text.split(', ')])
    return [*first, *rest]
