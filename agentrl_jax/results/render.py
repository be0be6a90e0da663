"""Tables as Markdown, LaTeX and CSV; the same table, the same bytes."""

import csv
import io
import math
import re
from collections.abc import Sequence

from agentrl_jax.records.series import SHARES, SUCCESSES
from agentrl_jax.results.cells import LINE_NAMES, OVERALL, RESAMPLES, Cell, Entry, Figure, Table
from agentrl_jax.results.spec import (
    AREA,
    BEST,
    COUNT,
    EQUAL_TOKENS,
    LAST,
    LAST_THREE,
    SUCCESS,
    Spec,
)

NOTHING = '—'
SINGLE = 'ʷ'  # marks the interval of a single run
P_NAME = 'p (Holm)'
SAME = 'same'  # marks a difference that is shown to be within the margin
MORE_IS_BETTER = (*SUCCESSES, 'gain', 'pass_at_k', 'return', 'answer_f1', 'valid_format')
BOLD = ('\ue000', '\ue001')  # around a figure; of Unicode's characters without a meaning
LATEX = {
    BOLD[0]: r'\textbf{',
    BOLD[1]: '}',
    '\\': r'\textbackslash{}',
    '{': r'\{',
    '}': r'\}',
    '&': r'\&',
    '%': r'\%',
    '$': r'\$',
    '#': r'\#',
    '_': r'\_',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    '>': r'$>$',
    '<': r'$<$',
    '|': r'$|$',
    NOTHING: '---',
    SINGLE: r'\textsuperscript{w}',
    '±': r'$\pm$',
}


def markdown(table: Table) -> str:
    """The table, the runs behind each of its figures, and what must be known to read them."""
    parts = [
        _markdown_table(matrix(table)),
        _markdown_table(details(table)),
        ''.join(f'- {_escape_markdown(note)}\n' for note in notes(table)),
    ]
    return '\n'.join(parts)


def latex(table: Table) -> str:
    """The table as a tabular of booktabs, the best row of each column bold; notes are comments."""
    marked = matrix(table, bold=True)
    header, *lines = [[_escape_latex(text) for text in line] for line in marked]
    body = [' & '.join(line) + r' \\' for line in lines]
    runs = sum(line.kind == 'runs' for line in table.lines)
    rows = [
        r'% \usepackage{booktabs}',
        rf'\begin{{tabular}}{{l{"r" * (len(header) - 1)}}}',
        r'\toprule',
        ' & '.join(header) + r' \\',
        r'\midrule',
        *body[:runs],
        *[r'\midrule'] * (len(body) > runs),
        *body[runs:],
        r'\bottomrule',
        r'\end{tabular}',
    ]
    return '\n'.join([*rows, *(f'% {_one_line(note)}' for note in notes(table))]) + '\n'


def csv_text(table: Table) -> str:
    """One line a cell, unrounded but for the last digits; shares from 0 to 1."""
    names = ['mean', 'std', 'iqm', 'low', 'high']
    header = ['kind', 'row', 'column', 'metric', 'at', 'runs', 'planned', 'unfinished', *names]
    header += ['interval', 'p_better', 'p_low', 'p_high', 'gain', 'gain_low', 'gain_high']
    header += ['p_holm', 'same']
    header += [*table.also, 'published', 'values']
    lines = [header]
    for line, column, cell in table.cells():
        *figures, interval = cell.figure
        lines.append(
            [
                line.kind,
                line.label,
                column,
                table.spec.metric,
                '0' if line.kind == 'start' else table.spec.at,
                len(cell.values),
                cell.planned,
                len(_unfinished(cell)),
                *map(_exact, figures),
                interval,
                *map(_exact, cell.better or (math.nan,) * 3),
                *map(_exact, cell.gain or (math.nan,) * 3),
                _exact(cell.p),
                cell.same if table.spec.margin and cell.gain else '',
                *map(_exact, cell.also or (math.nan,) * len(table.also)),
                published(table.spec, line.label, column),
                ' '.join(map(_exact, cell.values)),
            ]
        )
    return _csv(lines)


def runs_csv(table: Table) -> str:
    """One line a run: how far it is, its figure, and the Wilson interval of its episodes."""
    header = ['row', 'column', 'seed', 'run', 'step', 'steps', 'finished', 'counts', 'value']
    lines = [[*header, 'wilson_low', 'wilson_high', *table.also]]
    for line, column, cell in table.cells_of_runs():
        lines += [_run_line(line.label, column, entry) for entry in cell.entries]
    return _csv(lines)


def matrix(table: Table, *, bold: bool = False) -> list[list[str]]:
    """Header and lines: for each column its figure and what is shown beside it.

    bold: the best figures of a column are between BOLD.
    """
    spec = table.spec
    printed = {
        column: any(published(spec, line.label, column) for line in table.lines)
        for column in table.columns
    }
    tested = _tests(table) > 0
    header = [', '.join(spec.rows)]
    lines = [[line.label] for line in table.lines]
    for i, column in enumerate(table.columns):
        header += [column, *map(plain_name, table.also)]
        compared = [f'P(> {spec.baseline})', f'less {spec.baseline}', *[P_NAME] * tested]
        compared = compared[:1] if column == OVERALL else compared
        header += compared * bool(spec.baseline) + ['published'] * printed[column]
        best = _best(table, i) if bold else ''
        for texts, line in zip(lines, table.lines, strict=True):
            cell = line.cells[i]
            beside = cell.also if cell.planned else ()
            figure = _figure_text(cell, spec.metric)
            if line.kind == 'runs' and figure.split(' ')[0] == best:
                figure = figure.replace(best, best.join(BOLD), 1)
            texts.append(figure)
            texts += [number(name, x) for name, x in zip(table.also, beside, strict=False)]
            texts += [''] * (len(table.also) - len(beside))
            if spec.baseline:
                shown = [_better_text(cell), _gain_text(cell, spec.metric), _p_text(cell.p)]
                texts += shown[: len(compared)]
            if printed[column]:
                texts.append(published(spec, line.label, column))
    return [header, *lines]


def details(table: Table) -> list[list[str]]:
    """One line a cell: mean, standard deviation, and the figure of every run by its seed."""
    spec = table.spec
    seeds = ', '.join(map(str, table.seeds))
    lines = [
        [
            ', '.join(spec.rows),
            ', '.join(spec.cols) or 'metric',
            'mean ± s.d. of runs',
            f'runs of seeds {seeds}',
        ]
    ]
    for line, column, cell in table.cells():
        if cell.planned and column != OVERALL:
            runs = [_entry_text(entry, spec) for entry in cell.entries]
            runs += [f'{NOTHING} (seed {seed})' for seed in _missing_seeds(table, cell)]
            shown = _mean_text(cell.figure, spec.metric)
            lines.append([line.label, column, shown, ', '.join(runs)])
    return lines


def notes(table: Table) -> list[str]:
    """What a reader has to know; only what applies to this table."""
    spec = table.spec
    unit = ' in per cent' if is_share(spec.metric) else ''
    kinds = {cell.figure.interval for _, _, cell in table.cells()}
    found = [
        f'`{spec.metric}`{unit} {_place(spec)}: interquartile mean over seeds (runs that count / '
        'runs planned).'
    ]
    if 'bootstrap' in kinds:
        found.append(
            f'[ ]: 95 % interval, runs redrawn within each cell {RESAMPLES:,} times. Of few seeds '
            'it is too short: of normal ones it holds the truth in 76 % of cases with 3, 90 % with '
            '5 and 93 % with 10.'
        )
    if 'wilson' in kinds:
        found.append(f'{SINGLE}: one run; 95 % Wilson interval of its episodes.')
    if table.also:
        names = ' and '.join(map(plain_name, table.also))
        place = 'in the same way' if spec.at in (LAST_THREE, AREA) else 'at the same step'
        found.append(f'{names[0].upper()}{names[1:]}: mean over the same runs, {place}.')
    if spec.at == BEST:
        found.append('The best step was chosen on the episodes it is reported on: biased upwards.')
    if table.tokens:
        each = ', '.join(f'{column} {count:,}' for column, count in table.tokens.items())
        found.append(
            f'Sampled tokens: {each}, where the run of the column that sampled fewest ends; the '
            f'others are {"summed up to" if spec.at == AREA else "read"} there, linearly between '
            'two validations.'
        )
    if spec.baseline:
        found.append(
            f'P(> {spec.baseline}): share of pairs of runs that this row wins, ties half; no '
            'interval where redrawn runs are all alike.'
        )
        found.append(
            f'Less {spec.baseline}: mean difference of runs of one seed, which share '
            f"{_shared(table)}, with Student's 95 % interval."
        )
    if tests := _tests(table):
        found.append(
            f"{P_NAME}: Student's paired test of this difference, two-sided, adjusted for all such "
            f'tests of the table (Holm, n = {tests}).'
        )
    if spec.margin:
        found.append(
            f'{SAME}: the 90 % interval of the difference lies within '
            f'±{number(spec.metric, spec.margin)} (two one-sided tests at 5 %).'
        )
    if spec.overall:
        found.append(
            f'{OVERALL}: the runs of all columns, redrawn within each, where all have as many.'
        )
    if any(line.kind == 'clone' for line in table.lines):
        found.append(
            'Expert clone: no RL, but clean play of an expert who is asked at will, cloned for the '
            f'cost that {" and ".join(spec.clones)} names.'
        )
    elif spec.clones and spec.metric == SUCCESS and spec.at != AREA:
        found.append(f'No clone of {" and ".join(spec.clones)} sees what these runs see.')
    if spec.where:
        chosen = '; '.join(f'{name} = {" or ".join(x)}' for name, x in spec.where.items())
        found.append(f'Only runs with {chosen}.')
    return found + _absent(table)


def is_share(metric: str) -> bool:
    return metric.endswith(SHARES)


def plain_name(metric: str) -> str:
    """'eval/valid_format' is 'valid format'."""
    return metric.split('/')[-1].replace('_', ' ')


def number(metric: str, value: float) -> str:
    """A share in per cent with one decimal; anything else to four digits."""
    if math.isnan(value):
        return NOTHING
    return f'{100 * value:.1f}' if is_share(metric) else f'{value:.4g}'


def _shared(table: Table) -> str:
    """What runs of one seed have in common: a start only where step 0 was measured and is alike."""
    starts = [line.label for line in table.lines if line.kind == 'start']
    if starts == [LINE_NAMES['start']]:
        return 'start, levels and noise'
    return 'levels and noise, not all of them the start' if starts else 'levels and noise'


def published(spec: Spec, row: str, column: str) -> str:
    """The figure of others for a cell, '' if there is none."""
    figures = spec.published[row] if row in spec.published else {}
    return str(figures[column]) if column in figures else ''


def _tests(table: Table) -> int:
    """How many differences could be tested: none of one pair of runs."""
    return sum(not math.isnan(cell.p) for _, _, cell in table.cells())


def _best(table: Table, column: int) -> str:
    """The best figure of the rows in a column as printed; '' of one row, or if nothing is best."""
    metric = table.spec.metric
    figures = [line.cells[column].figure.iqm for line in table.lines if line.kind == 'runs']
    known = [figure for figure in figures if not math.isnan(figure)]
    rated = metric.split('/')[-1] in MORE_IS_BETTER
    return number(metric, max(known)) if rated and len(known) > 1 else ''


def _place(spec: Spec) -> str:
    known = {
        LAST: 'at the last step',
        LAST_THREE: 'as the mean of the last three validations of a run',
        AREA: 'as the mean over sampled tokens of a run',
        BEST: 'at the step of the best validation',
        EQUAL_TOKENS: 'at equal sampled tokens',
    }
    return known.get(spec.at, f'at step {spec.at}')


def _figure_text(cell: Cell, metric: str) -> str:
    shown = cell.figure
    text = number(metric, shown.iqm)
    if not math.isnan(shown.low):
        text += f' [{number(metric, shown.low)}, {number(metric, shown.high)}]'
        text += SINGLE * (shown.interval == 'wilson')
    if not cell.planned:
        return text
    left_out = len([entry for entry in _unfinished(cell) if not entry.counts])
    more = f', {left_out} unfinished' if left_out else ''
    refused = sum(bool(entry.fault) for entry in cell.entries)
    more += f', {refused} refused' if refused else ''
    return f'{text} ({len(cell.values)}/{cell.planned}{more})'


def _better_text(cell: Cell) -> str:
    if cell.better is None:
        return ''
    p, low, high = cell.better
    return f'{p:.2f}' + ('' if math.isnan(low) else f' [{low:.2f}, {high:.2f}]')


def _gain_text(cell: Cell, metric: str) -> str:
    if cell.gain is None:
        return ''
    mean, *ends = (('+' if x > 0 else '') + number(metric, x) for x in cell.gain)
    text = mean if math.isnan(cell.gain[1]) else f'{mean} [{", ".join(ends)}]'
    return f'{text} {SAME}' if cell.same else text


def _p_text(p: float) -> str:
    if math.isnan(p):
        return ''
    return f'{p:.3f}' if p >= 0.001 else '<0.001'


def _mean_text(shown: Figure, metric: str) -> str:
    spread = '' if math.isnan(shown.spread) else f' ± {number(metric, shown.spread)}'
    return number(metric, shown.mean) + spread


def _entry_text(entry: Entry, spec: Spec) -> str:
    text = number(spec.metric, entry.value)
    if entry.fault:
        return f'{NOTHING} (refused)'
    if entry.step is None:
        return f'{NOTHING} (not begun)'
    return text if entry.finished else f'{text} (at step {entry.step} of {entry.steps})'


def _missing_seeds(table: Table, cell: Cell) -> list[str]:
    known = {entry.seed for entry in cell.entries}
    return [str(seed) for seed in table.seeds if seed not in known]


def _unfinished(cell: Cell) -> list[Entry]:
    return [entry for entry in cell.entries if not entry.finished and not entry.fault]


def _absent(table: Table) -> list[str]:
    """Notes on runs that are refused or did not get there, and on seeds without a run."""
    refused, unfinished, missing = [], [], []
    for line, column, cell in table.cells_of_runs():
        place = f'{line.label} / {column}'
        faulty = [entry for entry in cell.entries if entry.fault]
        refused += [f'{place}, seed {entry.seed}: {entry.fault}' for entry in faulty]
        unfinished += [(place, entry) for entry in _unfinished(cell)]
        seeds = _missing_seeds(table, cell)
        missing += [f'{place} of seed {", ".join(seeds)}'] * bool(seeds)
    found = [f'Refused, in no figure: {"; ".join(refused)}.'] if refused else []
    if unfinished:
        counted = table.spec.unfinished == COUNT
        last = 'last validations' if table.spec.at == LAST_THREE else 'last validation'
        verdict = f'counted by their {last}' if counted else 'not counted'
        found.append(f'Unfinished, {verdict}: ' + '; '.join(map(_stands, unfinished)) + '.')
    if missing:
        found.append(f'Missing: {"; ".join(missing)}.')
    return found


def _stands(found: tuple[str, Entry]) -> str:
    place, entry = found
    where = 'not begun' if entry.step is None else f'at step {entry.step} of {entry.steps}'
    return f'{place}, seed {entry.seed}, {where}'


def _run_line(row: str, column: str, entry: Entry) -> list:
    low, high = entry.wilson or (math.nan, math.nan)
    return [
        row,
        column,
        entry.seed,
        entry.run,
        '' if entry.step is None else entry.step,
        entry.steps,
        entry.finished,
        entry.counts,
        *map(_exact, (entry.value, low, high, *entry.also)),
    ]


def _exact(value: float) -> str:
    return '' if math.isnan(value) else f'{value:.6g}'


def _csv(lines: Sequence[Sequence]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(lines)
    return text.getvalue()


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    escaped = [[_escape_markdown(text).replace('|', r'\|') for text in line] for line in lines]
    header, *body = [f'| {" | ".join(line)} |' for line in escaped]
    return '\n'.join([header, '|' + ' --- |' * len(lines[0]), *body]) + '\n'


def _escape_markdown(text: str) -> str:
    """Names of configs and folders are text: no markup, no link, no line of their own."""
    text = re.sub(r'&(?=#?\w+;)', '&amp;', _one_line(text))
    return re.sub(r'<(?=[A-Za-z/!?])', '&lt;', text).replace('](', r']\(')


def _escape_latex(text: str) -> str:
    return ''.join(LATEX.get(letter, letter) for letter in _one_line(text))


def _one_line(text: str) -> str:
    return ' '.join(text.splitlines())
