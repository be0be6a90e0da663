"""The description of a table, and the assignment of runs to its cells."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from agentrl_jax.records.method import method
from agentrl_jax.results.runs import AXES, Run

SUCCESS = 'eval/success'  # random play and the oracle are known of it only
METHOD = 'method'  # may take the place of a config field in rows, columns and where
OVERALL = 'all'  # the column over all others
PLACES = {  # where the value of a run is taken
    'last': 'at the last step',
    'last-three': 'as the mean of the last three validations of a run',
    'best-validation': 'at the step of the best validation',
    'equal-tokens': 'at equal sampled tokens',
    'area': 'as the mean over sampled tokens of a run',
}
LAST, LAST_THREE, BEST, EQUAL_TOKENS, AREA = PLACES
FREE = ('log', 'checkpoint', 'mesh')  # sections of a config that do not change what a run finds


def split_names(text: str | Iterable[str], separator: str = ',') -> tuple[str, ...]:
    """The names in a text joined by a separator, or in a list."""
    parts = text.split(separator) if isinstance(text, str) else text
    return tuple(part.strip() for part in parts if part.strip())


def _listed(separator: str) -> BeforeValidator:
    return BeforeValidator(lambda x: split_names(x, separator) if isinstance(x, str) else x)


Names = Annotated[tuple[str, ...], _listed(',')]
Values = Annotated[tuple[str, ...], _listed('|')]


@dataclass(frozen=True, config=ConfigDict(extra='forbid'), kw_only=True)
class Spec:
    """The description of a table; the keys of a table in an experiment's table.json.

    Names are lists, or texts joined by commas.
    """

    rows: Annotated[Names, Field(min_length=1)]  # config fields whose values name a row
    cols: Names = ()  # ... and a column
    metric: str = SUCCESS
    at: Literal[tuple(PLACES)] = LAST
    # last, last-three (mean of the last three validations), best-validation (the highest
    # eval/success), equal-tokens (where the run of the column with the fewest sampled tokens ends,
    # between two validations) or area (mean over the tokens up to there)
    also: Names = ('eval/valid_format',)  # more metrics to show, if runs have them
    baseline: str = ''  # label of the row that others are compared with
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] = 0.0  # differences
    # from the baseline within +- this, in units of the metric, are the same
    where: dict[str, Values] = Field(default_factory=dict)  # runs to take
    seeds: Annotated[int, Field(ge=0, strict=True)] = 0  # runs per cell; 0 = all seeds of any cell
    overall: StrictBool = False  # one more column over all columns, which are its strata
    signals: Names = ()  # further metrics to draw
    clones: Names = ()  # folders of runs of the expert's clones; in an experiment's table, names
    # of other experiments
    curves: StrictBool = True  # False: draw none, as where another table of the same runs has them
    labels: dict[str, str] = Field(default_factory=dict)  # names to show, in order
    published: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    # figures of others, as they printed them: {row: {column: figure}}


def make_spec(fields: Mapping[str, JsonValue]) -> Spec:
    """A Spec of plain values, as JSON or flags give them."""
    try:
        spec = TypeAdapter(Spec).validate_python(fields)
    except ValidationError as errors:
        first = errors.errors()[0]
        name = '.'.join(map(str, first['loc']))
        known = ', '.join(field.name for field in dataclasses.fields(Spec))
        raise ValueError(
            f'{name}={first["input"]!r}: {first["msg"]}; a table has {known}'
        ) from errors
    if spec.margin and not spec.baseline:
        raise ValueError(f'margin={spec.margin} needs a baseline: set baseline to a row')
    return dataclasses.replace(spec, also=[name for name in spec.also if name != spec.metric])


def metrics_of(spec: Spec) -> tuple[str, ...]:
    """The metrics that a table reads."""
    return (spec.metric, *spec.also, *spec.signals)


def show(value: Any) -> str:
    """A config value as a label: 0.25, ppo, True."""
    return f'{value:g}' if isinstance(value, float) else str(value)


def field(run: Run, name: str) -> Any:
    """The value of a config field, or of METHOD: what the config trains with (records.method)."""
    if name == METHOD and name not in run.fields:
        try:
            return method(run.fields)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f'run {run.name}: the method cannot be derived from its config'
            ) from error
    if name not in run.fields:
        near = difflib.get_close_matches(name, run.fields)
        raise ValueError(f'run {run.name} has no field {name}; close names: {near}')
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
            raise ValueError(f'no run has the metric {name}; there are {sorted(measured)}')
    return taken


def _label(run: Run, names: Sequence[str], spec: Spec) -> str:
    text = ', '.join(show(field(run, name)) for name in names)
    return spec.labels[text] if text in spec.labels else text


def group_runs(runs: Sequence[Run], spec: Spec) -> dict[tuple[str, str], tuple[Run, ...]]:
    """Runs by (row, column), in each by seed; the runs of a cell may differ in the seed only."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        column = _label(run, spec.cols, spec) if spec.cols else spec.metric
        found.setdefault((_label(run, spec.rows, spec), column), []).append(run)
    for (row, column), members in found.items():
        members.sort(key=lambda run: (rank(field(run, 'seed')), run.name))
        differ = _differing(members)
        if differ:
            raise ValueError(
                f'the runs of {row} / {column} differ in {", ".join(differ)}, not only in their '
                'seeds: add it to the rows or columns, or choose runs with where'
            )
        seeds = [run.fields['seed'] for run in members]
        twice = [run.name for run in members if seeds.count(run.fields['seed']) > 1]
        if twice:
            raise ValueError(f'{row} / {column} has runs of the same config: {", ".join(twice)}')
    return {key: tuple(members) for key, members in found.items()}


def _differing(runs: Sequence[Run]) -> list[str]:
    names = {name for run in runs for name in run.fields if name.split('.')[0] not in FREE}
    values = {
        name: {json.dumps(run.fields[name] if name in run.fields else None) for run in runs}
        for name in names - {'seed'}
    }
    return sorted(name for name, found in values.items() if len(found) > 1)


def rank(value: Any) -> tuple:
    """Numbers by size, before texts by letter."""
    try:
        return 0, float(str(value)), ''
    except ValueError:
        return 1, 0.0, str(value)


def ordered(labels: set[str], named: Mapping[str, str]) -> list[str]:
    """Labels in the order of the spec, then the rest part by part, numbers by size."""
    first = [label for label in dict.fromkeys(named.values()) if label in labels]
    rest = sorted(labels - set(first), key=lambda text: [rank(x) for x in text.split(', ')])
    return [*first, *rest]
