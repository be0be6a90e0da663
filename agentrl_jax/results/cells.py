"""The figures of a table: seeds joined, with intervals, beside start, random play and oracle."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentrl_jax.measure import stats
from agentrl_jax.results.runs import Run, complete
from agentrl_jax.results.spec import (
    AREA,
    BEST,
    COUNT,
    EQUAL_TOKENS,
    LAST_THREE,
    OVERALL,
    PLACES,
    SUCCESS,
    Spec,
    choose,
    field,
    group_runs,
    is_finished,
    ordered,
    rank,
)

RESAMPLES = 10_000
LINE_NAMES = {
    'start': 'starting policy',
    'clone': 'expert clone',
    'random': 'random play',
    'oracle': 'oracle',
}
PAID = re.compile('reward|cost|penalty|graded')  # fields of a world that change no play
ALIKE = (  # what a clone shares with the runs that it stands beside
    'env.name',
    'env.pool_seed',
    'env.eval_levels',
    'eval.split',
    'eval.temperature',
    'eval.top_k',
    'eval.top_p',
    'env.prompt',
    'env.hint',
    'env.think',
    'env.max_turns',
    'env.max_actions_per_turn',
    'env.max_actions_per_episode',
    'agent.name',
    'agent.trials',
    'agent.plan_every',
    'context.window',
    'context.summary',
    'model.path',
    'model.hidden_size',
    'model.intermediate_size',
    'model.num_layers',
    'lora.rank',
    'rollout.constrain',
    'rollout.max_tokens',
    'rollout.max_response',
    'rollout.stop_at_answer',
)


class Figure(NamedTuple):
    """One statistic of runs; nan where there is none."""

    mean: float = math.nan
    spread: float = math.nan  # unbiased standard deviation over runs
    iqm: float = math.nan
    low: float = math.nan  # 95 % interval of the IQM, or Wilson's of a single run
    high: float = math.nan
    interval: str = ''  # bootstrap, wilson or none


class Entry(NamedTuple):
    """What one run contributes to a cell."""

    run: str
    seed: Any
    step: int | None  # of the value; the last one of an unfinished run; None: it has not begun
    steps: int | None  # the run's last step, as planned
    value: float = math.nan
    also: tuple[float, ...] = ()
    wilson: tuple[float, float] | None = None
    finished: bool = False
    counts: bool = False  # it enters the statistic
    fault: str = ''  # why it never does, whatever is asked for; '' = nothing is wrong with it


class Cell(NamedTuple):
    figure: Figure
    entries: tuple[Entry, ...] = ()
    planned: int = 0  # 0: not a figure of runs
    also: tuple[float, ...] = ()  # means over the runs that count
    better: tuple[float, float, float] | None = None  # P(> baseline) and its interval
    gain: tuple[float, float, float] | None = None  # mean of this - baseline, seed by seed
    p: float = math.nan  # that it is 0, adjusted for all comparisons of the table
    same: bool = False  # it is shown to be within the margin

    @property
    def values(self) -> np.ndarray:
        return np.array([entry.value for entry in self.entries if entry.counts])


class Line(NamedTuple):
    kind: str  # runs, start, clone, random or oracle
    label: str
    cells: tuple[Cell, ...]  # one a column


class Table(NamedTuple):
    spec: Spec
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    also: tuple[str, ...]  # those of spec.also that some run has
    seeds: tuple[Any, ...]  # of any run
    runs: Mapping[tuple[str, str], tuple[Run, ...]]  # by (row, column)
    tokens: Mapping[str, int]  # by column: after how many sampled ones; empty if not equal

    def cells(self) -> Iterator[tuple[Line, str, Cell]]:
        """(line, column, cell) of all cells."""
        for line in self.lines:
            for column, cell in zip(self.columns, line.cells, strict=True):
                yield line, column, cell

    def cells_of_runs(self) -> Iterator[tuple[Line, str, Cell]]:
        """Those whose runs are no other cell's: of rows, without the column over all others."""
        return (x for x in self.cells() if x[0].kind == 'runs' and x[1] != OVERALL)


def build(runs: Sequence[Run], spec: Spec, clones: Sequence[Run] = ()) -> Table:
    """The table that spec describes, of those runs that it takes.

    clones: runs of which those without a step of RL, of the same seeds, are shown beside the runs
    that they share ALIKE with.
    """
    runs = choose(runs, spec)
    groups = group_runs(runs, spec)
    rows, columns = (ordered({key[i] for key in groups}, spec.labels) for i in (0, 1))
    also = tuple(
        name
        for name in spec.also
        if any(name in row and not math.isnan(row[name]) for r in runs for row in r.rows)
    )
    seeds = sorted({field(run, 'seed') for run in runs}, key=rank)
    planned = max(len(seeds), spec.seeds)
    tokens = _equal_tokens(groups, spec) if spec.at in (EQUAL_TOKENS, AREA) else {}

    def cell(row: str, column: str) -> Cell:
        members = groups.get((row, column), ())
        entries = [_entry(run, spec, also, tokens.get(column)) for run in members]
        return _cell(entries, planned, len(also))

    grid = {row: [cell(row, column) for column in columns] for row in rows}
    lines = _run_lines(grid, spec)
    lines += _start_lines(groups, rows, columns, planned, spec, also)
    known = [clone for clone in clones if field(clone, 'seed') in seeds]
    lines += _clone_lines(groups, rows, columns, planned, spec, known, len(also))
    lines += _reference_lines(groups, rows, columns, spec)
    shown = (*columns, OVERALL) if spec.overall else tuple(columns)
    return Table(spec, shown, tuple(lines), also, tuple(seeds), groups, tokens)


# ---- what a run says ---------------------------------------------------------------------------


def _equal_tokens(groups: Mapping[tuple[str, str], Sequence[Run]], spec: Spec) -> dict[str, int]:
    """The tokens that each column's runs had all sampled at their last validations."""
    found: dict[str, int] = {}
    for (_, column), runs in groups.items():
        for run in runs:
            rows = [row for row in run.rows if spec.metric in row]
            if any('tokens' not in row for row in rows):
                raise ValueError(f'at={spec.at}: run {run.name} does not say what it sampled')
            if spec.at == AREA and rows and not run.fault and rows[0]['tokens'] > 0:
                raise ValueError(f'at={AREA}: run {run.name} has no {spec.metric} at step 0')
            if rows and not run.fault and (is_finished(run) or spec.unfinished == COUNT):
                last = rows[-1]['tokens']
                if not last:
                    raise ValueError(
                        f'at={spec.at}: run {run.name} sampled no token before its last '
                        f'{spec.metric}, as a clone does: leave it out, or choose at=last'
                    )
                found[column] = min(last, found[column]) if column in found else last
    return found


def _at_tokens(rows: Sequence[Mapping[str, float]], tokens: int) -> Mapping[str, float]:
    """The validation after a number of sampled tokens, linearly between those around it.

    step: of the validation before; rows that end earlier: the last one.
    """
    before = [row for row in rows if row['tokens'] <= tokens]
    if len(before) == len(rows):
        return rows[-1]
    a, b = before[-1], rows[len(before)]
    share = (tokens - a['tokens']) / (b['tokens'] - a['tokens'])
    between = {name: (1 - share) * a[name] + share * b[name] for name in a if name in b}
    return between | {'step': a['step']}


def _last_three(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Means of metrics over the last three validations."""
    known = {name: [row[name] for row in rows[-3:] if name in row] for name in names}
    means = {name: sum(values) / len(values) for name, values in known.items() if values}
    return means | {'step': rows[-1]['step']}


def _area(
    rows: Sequence[Mapping[str, float]], names: Sequence[str], tokens: int | None
) -> dict[str, float]:
    """Means of metrics over the sampled tokens from 0 to a number, linear between validations.

    tokens: None, or more than the rows have: up to their end.
    """
    end = rows[-1] if tokens is None else _at_tokens(rows, tokens)
    until = [*(row for row in rows if row['tokens'] < end['tokens']), end]
    known = {name: [row for row in until if name in row] for name in names}
    found = {}
    for name, measured in known.items():
        if measured:
            x, y = np.array([(row['tokens'], row[name]) for row in measured]).T
            found[name] = float(np.trapezoid(y, x) / (x[-1] - x[0]) if x.size > 1 else y[0])
    return found | {'step': end['step']}


def _entry(run: Run, spec: Spec, also: Sequence[str], tokens: int | None = None) -> Entry:
    """The run's value at the place that the spec names; tokens: of its column, where equal."""
    seed, steps = field(run, 'seed'), field(run, 'steps')
    evaluated = [row for row in run.rows if spec.metric in row]
    finished = is_finished(run)
    if spec.at not in PLACES:
        evaluated = [row for row in evaluated if row['step'] <= int(spec.at)]
        finished = bool(evaluated) and evaluated[-1]['step'] == int(spec.at)
    if not evaluated:
        last = run.rows[-1]['step'] if run.rows else None
        return Entry(run.name, seed, last, steps, fault=run.fault)
    row = evaluated[-1]
    if spec.at == BEST:  # the earliest of the best
        known = [r for r in evaluated if SUCCESS in r and math.isfinite(r[SUCCESS])]
        row = max(known, key=lambda r: r[SUCCESS], default=row)
    elif spec.at == LAST_THREE:
        row = _last_three(evaluated, (spec.metric, *also))
    elif spec.at == AREA and not run.fault:
        row = _area(evaluated, (spec.metric, *also), tokens)
    elif tokens is not None:
        row = _at_tokens(evaluated, tokens)
    step = row['step'] if finished else run.rows[-1]['step']
    found = _reading(run, row, spec, also)._replace(step=step, finished=finished)
    fault = run.fault
    if not fault and not math.isfinite(found.value):
        fault = f'{spec.metric} is {found.value} at step {row["step"]}'
    if fault:
        return found._replace(value=math.nan, finished=False, fault=fault)
    return found._replace(counts=finished or spec.unfinished == COUNT)


def _reading(run: Run, row: Mapping[str, float], spec: Spec, also: Sequence[str]) -> Entry:
    """The metrics of one row of a run."""
    ends = [f'{spec.metric}_{end}' for end in ('low', 'high')]
    return Entry(
        run=run.name,
        seed=run.fields['seed'],
        step=row['step'],
        steps=run.fields['steps'],
        value=row[spec.metric],
        also=tuple(row.get(name, math.nan) for name in also),
        wilson=tuple(row[end] for end in ends) if all(end in row for end in ends) else None,
        finished=True,
    )


# ---- statistics --------------------------------------------------------------------------------


def figure(strata: Sequence[np.ndarray], wilson: tuple[float, float] | None = None) -> Figure:
    """Mean and IQM of all runs, and an interval: bootstrap within strata, or that of a run."""
    if not strata or any(len(runs) == 0 for runs in strata):
        return Figure()
    runs = np.concatenate(strata)
    spread = float(runs.std(ddof=1)) if runs.size > 1 else math.nan
    low, high, interval = math.nan, math.nan, 'none'
    if max(len(part) for part in strata) > 1:
        low, high = stats.stratified_bootstrap(strata, resamples=RESAMPLES)
        interval = 'bootstrap'
    elif runs.size == 1 and wilson:
        (low, high), interval = wilson, 'wilson'
    return Figure(float(runs.mean()), spread, float(stats.iqm(runs)), low, high, interval)


def _cell(entries: Sequence[Entry], planned: int, width: int) -> Cell:
    """The runs of one cell; width: how many metrics are shown beside its own."""
    used = [entry for entry in entries if entry.counts]
    single = used[0].wilson if len(used) == 1 else None
    columns = zip(*(entry.also for entry in used), strict=True)
    beside = [[x for x in column if not math.isnan(x)] for column in columns]
    return Cell(
        figure([np.array([entry.value for entry in used])], single),
        tuple(entries),
        max(planned, len(entries)),
        tuple(sum(x) / len(x) if x else math.nan for x in beside) or (math.nan,) * width,
    )


def _overall(cells: Sequence[Cell]) -> Cell:
    """All columns of a line together, each a stratum; no figure unless all have as many runs.

    With fewer runs in one column the others would weigh more, and rows could not be compared.
    """
    if not any(cell.planned for cell in cells):  # random play, the oracle
        mean = float(np.mean([cell.figure.mean for cell in cells]))
        return Cell(Figure(mean=mean, iqm=mean))
    strata = [cell.values for cell in cells]
    return Cell(
        figure(strata if len({len(values) for values in strata}) == 1 else []),
        tuple(entry for cell in cells for entry in cell.entries),
        sum(cell.planned for cell in cells),
        tuple(np.mean([cell.also for cell in cells], axis=0).tolist()),
    )


def _better(ours: Sequence[Cell], theirs: Sequence[Cell]) -> tuple[float, float, float] | None:
    """P(a run of ours beats one of theirs) with its interval, mean over columns."""
    pairs = [[cell.values for cell in cells] for cells in (ours, theirs)]
    sizes = [values.size for cells in pairs for values in cells]
    if min(sizes) == 0:
        return None
    low, high = stats.improvement_interval(*pairs, resamples=RESAMPLES)
    if low == high:  # one run each, or all pairs alike: redrawing says nothing of what is uncertain
        low = high = math.nan
    return stats.probability_of_improvement(*pairs), low, high


def _pairs(ours: Cell, theirs: Cell) -> tuple[list[float], list[float]] | None:
    """The values of runs of one seed; None without such runs."""
    values = [{e.seed: e.value for e in cell.entries if e.counts} for cell in (ours, theirs)]
    if any(
        len(of_seed) < cell.values.size
        for of_seed, cell in zip(values, (ours, theirs), strict=True)
    ):
        return None  # several runs of a seed
    seeds = sorted(values[0].keys() & values[1].keys(), key=rank)
    if not seeds:
        return None
    first, second = ([of_seed[seed] for seed in seeds] for of_seed in values)
    return first, second


def _compared(ours: Cell, theirs: Cell, margin: float) -> Cell:
    """A cell with its comparison with the baseline's; p of this one test."""
    found = ours._replace(better=_better([ours], [theirs]))
    pairs = _pairs(ours, theirs)
    if pairs is None:
        return found
    return found._replace(
        gain=stats.paired_difference(*pairs),
        p=stats.paired_p(*pairs),
        same=stats.equivalent(*pairs, margin),
    )


def _adjusted(lines: Sequence[Line]) -> list[Line]:
    """Lines whose p are adjusted for all comparisons."""
    adjusted = iter(stats.holm([cell.p for line in lines for cell in line.cells]).tolist())
    return [
        line._replace(cells=tuple(cell._replace(p=next(adjusted)) for cell in line.cells))
        for line in lines
    ]


# ---- lines -------------------------------------------------------------------------------------


def _run_lines(grid: Mapping[str, Sequence[Cell]], spec: Spec) -> list[Line]:
    """One line a row of the table, compared with the baseline where there is one."""
    if spec.baseline and spec.baseline not in grid:
        raise ValueError(f'baseline {spec.baseline!r} is no row; rows are {list(grid)}')
    lines = []
    for label, found in grid.items():
        cells, total = list(found), [_overall(found)] if spec.overall else []
        if spec.baseline and label != spec.baseline:
            base = grid[spec.baseline]
            cells = [_compared(*pair, spec.margin) for pair in zip(found, base, strict=True)]
            total = [cell._replace(better=_better(found, base)) for cell in total]
        lines.append(Line('runs', label, (*cells, *total)))
    return _adjusted(lines)


def _start_lines(
    groups: Mapping[tuple[str, str], Sequence[Run]],
    rows: Sequence[str],
    columns: Sequence[str],
    planned: int,
    spec: Spec,
    also: Sequence[str],
) -> list[Line]:
    """What the policies of step 0 reach: one line when all rows start from the same, else one each.

    Rows have the same start when wherever they have a seed in common, its first figures are equal.
    """
    found = {
        key: {(entry.seed, repr(entry[4:6])): entry for entry in _starts(runs, spec, also)}
        for key, runs in groups.items()
    }  # 4, 5: value and also

    def cell(members: Sequence[str], column: str) -> Cell:
        entries = {k: e for row in members for k, e in found.get((row, column), {}).items()}
        in_order = sorted(entries.values(), key=lambda entry: rank(entry.seed))
        return _cell(in_order, planned, len(also))

    def common(column: str) -> bool:
        of_seed: dict[Any, set] = {}
        for row in rows:
            starts = found.get((row, column), {})
            for seed in {seed for seed, _ in starts}:
                of_seed.setdefault(seed, set()).add(frozenset(x for s, x in starts if s == seed))
        return all(len(distinct) == 1 for distinct in of_seed.values())

    return _shared_lines('start', rows, columns, cell, all(map(common, columns)), spec)


def _starts(runs: Sequence[Run], spec: Spec, also: Sequence[str]) -> list[Entry]:
    return [
        _reading(run, row, spec, also)._replace(counts=True)
        for run in runs
        for row in run.rows[:1]
        if row['step'] == 0 and spec.metric in row and math.isfinite(row[spec.metric])
    ]


def _clone_lines(
    groups: Mapping[tuple[str, str], Sequence[Run]],
    rows: Sequence[str],
    columns: Sequence[str],
    planned: int,
    spec: Spec,
    clones: Sequence[Run],
    width: int,
) -> list[Line]:
    """Clones of the expert that see what the runs see: one line when the rows share them.

    A clone is known by its end alone, so the mean over the tokens of a run has none beside it.
    """
    if spec.metric != SUCCESS or spec.at == AREA:
        return []
    ended = [run for run in clones if _is_clone(run, spec.metric)]
    if not ended:
        return []
    firsts = {key: runs[0] for key, runs in groups.items()}
    whole = complete([*ended, *firsts.values()])
    ended, firsts = whole[: len(ended)], dict(zip(firsts, whole[len(ended) :], strict=True))

    def alike(row: str, column: str) -> list[Run]:
        run = firsts.get((row, column))
        return [clone for clone in ended if run and _is_alike(clone, run)]

    def cell(members: Sequence[str], column: str) -> Cell:
        found = {
            i: clone
            for row in members
            for i, clone in enumerate(ended)
            if clone in alike(row, column)
        }
        entries = [
            _reading(clone, clone.rows[-1], spec, ())._replace(
                also=(math.nan,) * width, counts=True
            )
            for clone in found.values()
        ]
        seeds = [entry.seed for entry in entries]
        if len(set(seeds)) < len(seeds):
            names = ', '.join(clone.name for clone in found.values())
            raise ValueError(f'clones: {names} see the same, and some have one seed: name one set')
        return _cell(entries, planned, width)

    shared = all(
        len({tuple(clone.name for clone in alike(row, column)) for row in rows}) == 1
        for column in columns
    )
    return _shared_lines('clone', rows, columns, cell, shared, spec)


def _is_clone(run: Run, metric: str) -> bool:
    """Whether it is cloned from the expert's own play, untrained otherwise, and has its figure."""
    shown = run.fields.get('clone.episodes', 0) > 0 and run.fields.get('clone.oracle') == 1
    ended = field(run, 'steps') == 0 and is_finished(run) and not run.fault
    return shown and ended and math.isfinite(run.rows[-1].get(metric, math.nan))


def _is_alike(clone: Run, run: Run) -> bool:
    """Whether both are of one world and its levels, with the same prompts, budgets and policy.

    What is paid may differ, for clones do not learn from it. Both are of one version (complete);
    a field that one of them still lacks, since its config cannot be read, is not compared.
    """
    world = f'{run.fields["env.name"]}.'
    names = [n for n in run.fields if n.startswith(world) and not PAID.search(n)]
    known = [n for n in (*ALIKE, *names) if n in clone.fields and n in run.fields]
    return all(clone.fields[name] == run.fields[name] for name in known)


def _reference_lines(
    groups: Mapping[tuple[str, str], Sequence[Run]],
    rows: Sequence[str],
    columns: Sequence[str],
    spec: Spec,
) -> list[Line]:
    """Random play and the oracle on the same levels: one line each when the rows share them."""
    if spec.metric != SUCCESS:
        return []

    def values(kind: str, row: str, column: str) -> list[float]:
        runs = groups.get((row, column), ())
        return sorted({run.reference[kind] for run in runs if kind in run.reference})

    def lines(kind: str) -> list[Line]:
        def cell(members: Sequence[str], column: str) -> Cell:
            known = sorted({x for row in members for x in values(kind, row, column)})
            mean = sum(known) / len(known) if known else math.nan
            return Cell(Figure(mean=mean, iqm=mean))

        shared = all(
            len({tuple(found) for row in rows if (found := values(kind, row, column))}) <= 1
            for column in columns
        )
        return _shared_lines(kind, rows, columns, cell, shared, spec)

    return lines('random') + lines('oracle')


def _shared_lines(
    kind: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[Sequence[str], str], Cell],
    shared: bool,
    spec: Spec,
) -> list[Line]:
    """One line for all rows or one for each; none without a figure."""
    lines = []
    for members in [list(rows)] if shared else [[row] for row in rows]:
        cells = [cell(members, column) for column in columns]
        if spec.overall:
            cells.append(_overall(cells))
        label = LINE_NAMES[kind] if shared else f'{members[0]}: {LINE_NAMES[kind]}'
        if any(not math.isnan(found.figure.mean) for found in cells):
            lines.append(Line(kind, label, tuple(cells)))
    return lines
