"""Cells of a table: the runs of a row and column, and their statistics.

Random play, the oracle, the starting policies and the expert's clones are further lines.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from agentrl_jax.measure import stats
from agentrl_jax.results.runs import Row, Run, complete
from agentrl_jax.results.spec import (
    AREA,
    BEST,
    EQUAL_TOKENS,
    LAST_THREE,
    OVERALL,
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
RUNS, START, CLONE, RANDOM, ORACLE = 'runs', 'start', 'clone', 'random', 'oracle'
LINE_NAMES = {
    START: 'starting policy',
    CLONE: 'expert clone',
    RANDOM: 'random play',
    ORACLE: 'oracle',
}
REWARD_FIELDS = re.compile(
    'reward|cost|penalty|graded'
)  # environment fields that do not change play
CLONE_FIELDS = tuple(  # fields in which a clone and the runs it is compared with must agree
    f'{section}.{name}'
    for section, names in (
        ('env', 'name pool_seed eval_levels prompt hint think max_turns max_actions_per_turn'),
        ('env', 'max_actions_per_episode'),
        ('eval', 'split temperature top_k top_p'),
        ('agent', 'name trials'),
        ('context', 'window summary'),
        ('model', 'path hidden_size intermediate_size num_layers'),
        ('lora', 'rank'),
        ('rollout', 'constrain max_tokens max_response stop_at_answer'),
    )
    for name in names.split()
)
COMPARISONS = ('p_better', 'p_low', 'p_high', 'gain', 'gain_low', 'gain_high', 'p_holm')
COUNTS = ('runs', 'planned', 'unfinished', 'refused')
Entry = dict[str, Any]  # one run of a cell: a line of Table.entries
Cell = dict[str, Any]  # a line of Table.cells
Groups = Mapping[tuple[str, str], Sequence[Run]]  # runs by (row, column)
Entries = dict[tuple[str, str], dict[tuple[Hashable, Hashable], Entry]]  # ... by (seed, identity)


@dataclasses.dataclass
class Table:
    """All figures of a table; build() fills in the two frames at the end.

    entries: one line per run of a cell. Columns: kind, row, column, seed, run, step, steps,
      finished (is in the statistics), value, wilson_low, wilson_high, fault, `also`.
    cells: one line per cell. kind is RUNS or a key of LINE_NAMES. planned is 0 if no run
      contributes to the figure. p_holm is adjusted for all comparisons; values is an array.
    """

    spec: Spec
    rows: Sequence[str]
    columns: Sequence[str]
    also: tuple[str, ...]  # names in spec.also that at least one run measured
    seeds: Sequence[Any]
    runs: Groups
    tokens: Mapping[str, int]  # by column: the number of sampled tokens; empty if not equal
    entries: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)
    cells: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)

    def lines(self, *kinds: str) -> list[tuple[str, list[Cell]]]:
        """(label, cells in the order of the columns) of each line of these kinds; () = all."""
        return [(x[1], cells) for x, cells in self._lines.items() if not kinds or x[0] in kinds]

    def entries_of(self, label: str, column: str, kind: str = RUNS) -> list[Entry]:
        """The runs of a cell."""
        return self._entries.get((kind, label, column), [])

    @functools.cached_property
    def _lines(self) -> dict[tuple[str, ...], list[Cell]]:
        return _records(self.cells, ['kind', 'row'])

    @functools.cached_property
    def _entries(self) -> dict[tuple[str, ...], list[Entry]]:
        return _records(self.entries, ['kind', 'row', 'column'])


def _records(frame: pd.DataFrame, keys: Sequence[str]) -> dict[tuple[str, ...], list[Entry]]:
    groups = frame.groupby(keys, sort=False)
    return {key: group.to_dict('records') for key, group in groups}


def build(runs: Sequence[Run], spec: Spec, clones: Sequence[Run] = ()) -> Table:
    """Build the table of a spec.

    clones: behaviour clones without RL; only those with the seeds of the runs are used. Each is
    compared with the runs that have the same CLONE_FIELDS.
    """
    runs = choose(runs, spec)
    groups = group_runs(runs, spec)
    rows, columns = (ordered({key[i] for key in groups}, spec.labels) for i in (0, 1))
    if spec.baseline and spec.baseline not in rows:
        raise ValueError(f'baseline {spec.baseline!r} is not a row; rows are {rows}')
    measured = {name for r in runs for row in r.rows for name, x in row.items() if x == x}
    also = tuple(name for name in spec.also if name in measured)
    seeds = sorted({field(run, 'seed') for run in runs}, key=rank)
    tokens = _equal_tokens(groups, spec) if spec.at in (EQUAL_TOKENS, AREA) else {}
    table = Table(spec, rows, columns, also, seeds, groups, tokens)
    run_entries = {
        (row, column): {
            (None, i): _entry(run, spec, also, tokens.get(column)) for i, run in enumerate(members)
        }
        for (row, column), members in groups.items()
    }
    lines = {RUNS: run_entries, START: _starts(table)}
    lines[CLONE] = _clones(table, [run for run in clones if field(run, 'seed') in seeds])
    lines |= {kind: _references(table, kind) for kind in (RANDOM, ORACLE)}
    entries, cells = [], []
    for kind, entries_by_cell in lines.items():
        for label, parts in _merged(kind, entries_by_cell, table):
            line = [_cell(kind, part, table) for part in parts]
            if spec.overall:
                line.append(_overall(line, also))
            if kind != RUNS and all(math.isnan(cell['mean']) for cell in line):
                continue
            names = [*columns, OVERALL]
            keys = [{'kind': kind, 'row': label, 'column': column} for column in names]
            cells += [key | cell for key, cell in zip(keys, line, strict=False)]
            if kind not in (RANDOM, ORACLE):
                parts_by_key = zip(keys, parts, strict=False)
                entries += [key | entry for key, part in parts_by_key for entry in part]
    _compare(cells, entries, spec)
    table.columns = [*columns, *[OVERALL] * spec.overall]
    table.entries = pd.DataFrame(entries).astype({'step': 'Int64'})
    table.cells = pd.DataFrame(cells)
    return table


# ---- the value of a run ------------------------------------------------------------------------


def _equal_tokens(groups: Groups, spec: Spec) -> dict[str, int]:
    """Tokens that all runs of a column had sampled at their last validations, by column."""
    least: dict[str, int] = {}
    for (_, column), runs in groups.items():
        for run in runs:
            rows = [row for row in run.rows if spec.metric in row]
            if any('tokens' not in row for row in rows):
                raise ValueError(f'at={spec.at}: run {run.name} has rows without sampled tokens')
            if spec.at == AREA and rows and not run.fault and rows[0]['tokens'] > 0:
                raise ValueError(f'at={AREA}: run {run.name} has no {spec.metric} at step 0')
            if rows and not run.fault and is_finished(run):
                last = rows[-1]['tokens']
                if not last:
                    raise ValueError(
                        f'at={spec.at}: run {run.name} sampled no tokens before its last '
                        f'{spec.metric}, like a clone: leave it out, or choose at=last'
                    )
                least[column] = min(last, least.get(column, last))
    return least


def _at_tokens(rows: Sequence[Row], tokens: int) -> Row:
    """The interpolated validation after a number of sampled tokens; past the end, the last one.

    The step is that of the preceding validation.
    """
    before = [row for row in rows if row['tokens'] <= tokens]
    if len(before) == len(rows):
        return rows[-1]
    a, b = before[-1], rows[len(before)]
    share = (tokens - a['tokens']) / (b['tokens'] - a['tokens'])
    between = {name: (1 - share) * a[name] + share * b[name] for name in a if name in b}
    return between | {'step': a['step']}


def _last_three(rows: Sequence[Row], names: Sequence[str]) -> Row:
    """Means of metrics over the last three validations."""
    known = {name: [row[name] for row in rows[-3:] if name in row] for name in names}
    means = {name: sum(values) / len(values) for name, values in known.items() if values}
    return means | {'step': rows[-1]['step']}


def _area(rows: Sequence[Row], names: Sequence[str], tokens: int | None) -> Row:
    """Means of metrics over the sampled tokens, linearly interpolated between validations.

    tokens: end of the range; None: the last validation.
    """
    end = rows[-1] if tokens is None else _at_tokens(rows, tokens)
    until = [*(row for row in rows if row['tokens'] < end['tokens']), end]
    means = {'step': end['step']}
    for name in names:
        points = [(row['tokens'], row[name]) for row in until if name in row]
        if points:
            x, y = np.array(points).T
            means[name] = float(np.trapezoid(y, x) / (x[-1] - x[0]) if x.size > 1 else y[0])
    return means


def _entry(run: Run, spec: Spec, also: Sequence[str], tokens: int | None) -> Entry:
    """The run's value at spec.at; tokens: of its column with AREA and EQUAL_TOKENS."""
    evaluated = [row for row in run.rows if spec.metric in row]
    finished = is_finished(run)
    end = run.rows[-1]['step'] if run.rows else None
    if not evaluated:
        return _reading(run, {}, spec, also) | {'step': end, 'fault': run.fault}
    row = evaluated[-1]
    if spec.at == BEST:  # the earliest in a tie
        known = [r for r in evaluated if math.isfinite(r.get(SUCCESS, math.nan))]
        row = max(known, key=lambda r: r[SUCCESS], default=row)
    elif spec.at == LAST_THREE:
        row = _last_three(evaluated, (spec.metric, *also))
    elif spec.at == AREA and not run.fault:
        row = _area(evaluated, (spec.metric, *also), tokens)
    elif tokens is not None:
        row = _at_tokens(evaluated, tokens)
    entry = _reading(run, row, spec, also) | {'step': row['step'] if finished else end}
    fault = run.fault
    if not fault and not math.isfinite(entry['value']):
        fault = f'{spec.metric} is {entry["value"]} at step {row["step"]}'
    if fault:
        return entry | {'value': math.nan, 'fault': fault}
    return entry | {'finished': finished}


def _reading(run: Run, row: Row, spec: Spec, also: Sequence[str]) -> Entry:
    """The entry of one row of a run; `finished` is set by the caller."""
    ends = [row.get(f'{spec.metric}_{end}', math.nan) for end in ('low', 'high')]
    return {
        'seed': field(run, 'seed'),
        'run': run.name,
        'step': row.get('step'),
        'steps': field(run, 'steps'),
        'finished': False,
        'value': row.get(spec.metric, math.nan),
        'wilson_low': ends[0],
        'wilson_high': ends[1],
        'fault': '',
        **{name: row.get(name, math.nan) for name in also},
    }


# ---- lines -------------------------------------------------------------------------------------


def _starts(table: Table) -> Entries:
    """Step 0 of all runs; runs with equal figures there count as the same start."""
    spec, starts = table.spec, {}
    for key, runs in table.runs.items():
        for run in runs:
            row = run.rows[0] if run.rows else {}
            if row.get('step') == 0 and math.isfinite(row.get(spec.metric, math.nan)):
                entry = _reading(run, row, spec, table.also) | {'finished': True}
                figures = repr([entry[name] for name in ('value', *table.also)])
                starts.setdefault(key, {})[entry['seed'], figures] = entry
    return starts


def _clones(table: Table, clones: Sequence[Run]) -> Entries:
    """Clones of the expert with the same environment and observations as the runs.

    A clone has only a final value, so it is not compared with the area under a run's curve.
    """
    spec = table.spec
    if spec.metric != SUCCESS or spec.at == AREA:
        return {}
    valid = [run for run in clones if _is_clone(run, spec.metric)]
    firsts = {key: runs[0] for key, runs in table.runs.items()} if valid else {}
    runs = complete([*valid, *firsts.values()])
    valid, firsts = runs[: len(valid)], dict(zip(firsts, runs[len(valid) :], strict=True))
    nothing = dict.fromkeys(table.also, math.nan)
    return {
        key: {
            (None, i): _reading(clone, clone.rows[-1], spec, ()) | {'finished': True, **nothing}
            for i, clone in enumerate(valid)
            if _same_settings(clone, run)
        }
        for key, run in firsts.items()
    }


def _is_clone(run: Run, metric: str) -> bool:
    """Whether a run only clones the expert, without RL, and has measured the metric."""
    cloned = run.fields.get('clone.episodes', 0) > 0 and run.fields.get('clone.oracle') == 1
    cloned &= run.fields.get('clone.expert', 'world') == 'world'
    is_finished_clone = field(run, 'steps') == 0 and is_finished(run) and not run.fault
    return cloned and is_finished_clone and math.isfinite(run.rows[-1].get(metric, math.nan))


def _same_settings(clone: Run, run: Run) -> bool:
    """Whether both have the same environment, levels, prompts, budgets and policy.

    Rewards may differ, because clones do not learn from them. Both have the fields of the same
    version. A field that is missing in one of them (its config cannot be read) is not compared.
    """
    world = f'{run.fields["env.name"]}.'
    names = [n for n in run.fields if n.startswith(world) and not REWARD_FIELDS.search(n)]
    known = [n for n in (*CLONE_FIELDS, *names) if n in clone.fields and n in run.fields]
    return all(clone.fields[name] == run.fields[name] for name in known)


def _references(table: Table, kind: str) -> Entries:
    """The success of random play or the oracle on the levels of the runs."""
    if table.spec.metric != SUCCESS:
        return {}
    return {
        key: {
            (None, x): {'value': x} for x in sorted({r.reference.get(kind) for r in runs} - {None})
        }
        for key, runs in table.runs.items()
    }


def _merged(kind: str, entries: Entries, table: Table) -> list[tuple[str, list[list[Entry]]]]:
    """(label, entries per column) of the lines of a kind: one line if it is equal for all rows."""

    def rows_agree(column: str) -> bool:
        keys = [entries.get((row, column), {}).keys() for row in table.rows]
        for seed in {seed for each in keys for seed, _ in each}:
            sets = {frozenset(key for key in each if key[0] == seed) for each in keys}
            if len(sets if kind == CLONE else sets - {frozenset()}) > 1:
                return False
        return True

    shared = kind != RUNS and all(map(rows_agree, table.columns))
    lines = []
    for members in [table.rows] if shared else [[row] for row in table.rows]:
        parts = []
        for column in table.columns:
            union = {k: e for row in members for k, e in entries.get((row, column), {}).items()}
            part = sorted(union.values(), key=lambda entry: rank(entry.get('seed', 0)))
            seeds = [entry.get('seed') for entry in part]
            if kind == CLONE and len(set(seeds)) < len(seeds):
                names = ', '.join(entry['run'] for entry in part)
                raise ValueError(
                    f'clones: {names} have the same settings and repeated seeds: pass only one set'
                )
            parts.append(part)
        name = LINE_NAMES.get(kind, members[0])
        lines.append((name if shared or kind == RUNS else f'{members[0]}: {name}', parts))
    return lines


# ---- statistics --------------------------------------------------------------------------------


def _cell(kind: str, entries: Sequence[Entry], table: Table) -> Cell:
    """The statistics of one cell: of its runs, or of random play or the oracle."""
    if kind in (RANDOM, ORACLE):
        values = sorted(entry['value'] for entry in entries)
        mean = sum(values) / len(values) if values else math.nan
        nothing = dict.fromkeys(('std', 'low', 'high', *table.also), math.nan)
        nothing |= dict.fromkeys(COUNTS, 0) | {'interval': '', 'values': np.array([])}
        return nothing | {'mean': mean, 'iqm': mean}
    used = [entry for entry in entries if entry['finished']]
    known = {name: [e[name] for e in used if e[name] == e[name]] for name in table.also}
    cell = {
        'runs': len(used),
        'planned': max(len(table.seeds), table.spec.seeds, len(entries)),
        'unfinished': sum(not e['finished'] and not e['fault'] for e in entries),
        'refused': sum(bool(e['fault']) for e in entries),
        'values': np.array([entry['value'] for entry in used]),
        **{name: sum(x) / len(x) if x else math.nan for name, x in known.items()},
    }
    cell |= _figure([cell['values']])
    wilson = [used[0]['wilson_low'], used[0]['wilson_high']] if len(used) == 1 else [math.nan]
    if not math.isnan(sum(wilson)):
        cell |= {'low': wilson[0], 'high': wilson[1], 'interval': 'wilson'}
    return cell


def _figure(strata: Sequence[np.ndarray]) -> Cell:
    """Mean and IQM of all runs, with a bootstrap interval (resampled within strata)."""
    runs = np.concatenate([np.asarray(part, float) for part in strata] or [np.array([])])
    nothing = dict.fromkeys(('mean', 'std', 'iqm', 'low', 'high'), math.nan)
    if not strata or any(len(part) == 0 for part in strata):
        return nothing | {'interval': ''}
    spread = float(runs.std(ddof=1)) if runs.size > 1 else math.nan
    figure = {'mean': float(runs.mean()), 'std': spread, 'iqm': float(stats.iqm(runs))}
    if max(map(len, strata)) == 1:
        return nothing | figure | {'interval': 'none'}
    low, high = stats.stratified_bootstrap(strata, resamples=RESAMPLES)
    return figure | {'low': low, 'high': high, 'interval': 'bootstrap'}


def _overall(cells: Sequence[Cell], also: Sequence[str]) -> Cell:
    """Statistics over all columns of a line (strata); nan if their numbers of runs differ.

    Unequal numbers would weight the columns differently in each row.
    """
    if not any(cell['planned'] for cell in cells):  # random play, the oracle
        return cells[0] | {
            name: float(np.mean([c[name] for c in cells])) for name in ('mean', 'iqm')
        }
    strata = [cell['values'] for cell in cells]
    total = {name: sum(cell[name] for cell in cells) for name in COUNTS}
    total |= {name: float(np.mean([cell[name] for cell in cells])) for name in also}
    figure = _figure(strata if len({len(values) for values in strata}) == 1 else [])
    return total | figure | {'values': np.concatenate(strata)}


def _compare(cells: Sequence[Cell], entries: Sequence[Entry], spec: Spec) -> None:
    """Add the comparison of each row with the baseline to the cells."""
    values, used = {}, {}
    for cell in cells:
        cell |= dict.fromkeys(COMPARISONS, math.nan) | {'same': False}
        if cell['kind'] == RUNS:
            values.setdefault(cell['row'], {})[cell['column']] = cell['values']
    for entry in entries:
        if entry['kind'] == RUNS and entry['finished']:
            used.setdefault((entry['row'], entry['column']), []).append(entry)
    for cell in cells:
        row, column = cell['row'], cell['column']
        if cell['kind'] == RUNS and spec.baseline and row != spec.baseline:
            names = [name for name in values[row] if (name == column) != (column == OVERALL)]
            cell |= _better(*([values[one][n] for n in names] for one in (row, spec.baseline)))
            pair = [used.get((one, column), []) for one in (row, spec.baseline)]
            cell |= _gain(*pair, spec.margin)
    for cell, p in zip(cells, stats.holm([cell['p_holm'] for cell in cells]), strict=True):
        cell['p_holm'] = p


def _better(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Cell:
    """P(a run of ours beats one of theirs), averaged over columns, with its interval."""
    if min(values.size for values in [*ours, *theirs]) == 0:
        return {}
    low, high = stats.improvement_interval(ours, theirs, resamples=RESAMPLES)
    if low == high:  # one run each, or all pairs equal: resampling has no variance
        low = high = math.nan
    p = stats.probability_of_improvement(ours, theirs)
    return {'p_better': p, 'p_low': low, 'p_high': high}


def _gain(ours: Sequence[Entry], theirs: Sequence[Entry], margin: float) -> Cell:
    """The mean paired difference and its test; {} if a seed has several runs."""
    values = [{entry['seed']: entry['value'] for entry in part} for part in (ours, theirs)]
    seeds = sorted(values[0].keys() & values[1].keys(), key=rank)
    if not seeds or [len(each) for each in values] != [len(ours), len(theirs)]:
        return {}
    pair = [[by_seed[seed] for seed in seeds] for by_seed in values]
    gain, low, high = stats.paired_difference(*pair)
    return {
        'gain': gain,
        'gain_low': low,
        'gain_high': high,
        'p_holm': stats.paired_p(*pair),
        'same': stats.equivalent(*pair, margin),
    }
