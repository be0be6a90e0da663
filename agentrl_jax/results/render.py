"""Tables as Markdown, LaTeX and CSV; equal tables give equal bytes."""

import math
import re
from collections.abc import Sequence

import pandas as pd

from agentrl_jax.records.series import SHARES, SUCCESSES
from agentrl_jax.results.cells import (
    CLONE,
    COMPARISONS,
    LINE_NAMES,
    OVERALL,
    RESAMPLES,
    RUNS,
    START,
    Cell,
    Entry,
    Table,
)
from agentrl_jax.results.spec import AREA, BEST, LAST_THREE, PLACES, SUCCESS, Spec

NOTHING = '—'
SINGLE = 'ʷ'  # marks the interval of a single run
P_NAME = 'p (Holm)'
MAX_COLUMNS = 5  # of a Markdown table of figures
ARM = 'arm'  # title of rows that are named by more than two fields
SAME = 'same'  # marks a difference that is significantly within the margin
MORE_IS_BETTER = (*SUCCESSES, 'gain', 'pass_at_k', 'return', 'answer_f1', 'valid_format')
BOLD = ('\ue000', '\ue001')  # around a bold figure; from Unicode's private-use area
LATEX = str.maketrans(
    {
        BOLD[0]: r'\textbf{',
        BOLD[1]: '}',
        '\\': r'\textbackslash{}',
        **{sign: rf'\{sign}' for sign in '{}&%$#_'},
        '~': r'\textasciitilde{}',
        '^': r'\textasciicircum{}',
        **{sign: f'${sign}$' for sign in '><|'},
        NOTHING: '---',
        SINGLE: r'\textsuperscript{w}',
        '±': r'$\pm$',
    }
)


def markdown(table: Table) -> str:
    """Return the figures, the comparisons, the runs of each figure, and notes."""
    parts = [
        *map(_markdown_table, figures(table)),
        *[_markdown_table(comparisons(table))] * bool(table.spec.baseline),
        _markdown_table(details(table)),
        ''.join(f'- {_escape_markdown(note)}\n' for note in notes(table)),
    ]
    return '\n'.join(parts)


def latex(table: Table) -> str:
    """Return booktabs tabulars with the best row of each column in bold and notes as comments."""
    tabulars = [_tabular(lines, len(table.lines(RUNS))) for lines in figures(table, bold=True)]
    tabulars += [_tabular(comparisons(table))] * bool(table.spec.baseline)
    remarks = ''.join(f'% {_one_line(note)}\n' for note in notes(table))
    return '% \\usepackage{booktabs}\n' + ''.join(tabulars) + remarks


def _tabular(lines: Sequence[Sequence[str]], rule_after: int = 0) -> str:
    """A tabular, with a rule after this number of lines, if more follow."""
    header, *body = [[_one_line(text).translate(LATEX) for text in line] for line in lines]
    if 0 < rule_after < len(body):
        body[rule_after][0] = f'\\midrule\n{body[rule_after][0]}'
    form = 'l' + 'r' * (len(header) - 1)
    return pd.DataFrame(body, columns=header).to_latex(index=False, column_format=form)


def csv_text(table: Table) -> str:
    """Return one line per cell with six digits; shares from 0 to 1."""
    spec, cells = table.spec, table.cells.copy()
    cells['metric'] = spec.metric
    cells['at'] = ['0' if kind == START else spec.at for kind in cells.kind]
    cells['same'] = cells.same.where(cells.gain.notna() & bool(spec.margin), '')
    keys = zip(cells.row, cells.column, strict=True)
    cells['published'] = [published(spec, *key) for key in keys]
    cells['values'] = [' '.join(f'{x:.6g}' for x in values) for values in cells['values']]
    names = ['kind', 'row', 'column', 'metric', 'at', 'runs', 'planned', 'unfinished', 'mean']
    names += ['std', 'iqm', 'low', 'high', 'interval', *COMPARISONS, 'same', *table.also]
    return _csv(cells[[*names, 'published', 'values']])


def runs_csv(table: Table) -> str:
    """Return one line per run: its progress, figure and Wilson interval."""
    names = ['row', 'column', 'seed', 'run', 'step', 'steps', 'finished', 'value']
    entries = table.entries[table.entries.kind == RUNS]
    return _csv(entries[[*names, 'wilson_low', 'wilson_high', *table.also]])


def _csv(lines: pd.DataFrame) -> str:
    return lines.to_csv(index=False, float_format='%.6g', lineterminator='\n')


def figures(table: Table, *, bold: bool = False) -> list[list[list[str]]]:
    """Tables of at most MAX_COLUMNS columns, as header and lines.

    bold: mark the best figures of each column with BOLD.
    """
    spec = table.spec
    lines = table.lines()
    parts = []
    for i, column in enumerate(table.columns):
        cells = [cells[i] for _, cells in lines]
        best = _best(spec.metric, cells) if bold else ''
        parts.append([column, *(_figure_text(cell, spec.metric, best) for cell in cells)])
        printed = [published(spec, label, column) for label, _ in lines]
        parts += [['published', *printed]] * any(printed)
        for name in _also_beside(table):
            values = [number(name, cell[name]) if cell['planned'] else '' for cell in cells]
            parts.append([plain_name(name), *values])
    labels = [_rows_title(spec), *(label for label, _ in lines)]
    size = MAX_COLUMNS - 1
    tables = [parts[i : i + size] for i in range(0, len(parts), size)]
    return [[list(line) for line in zip(labels, *part, strict=True)] for part in tables]


def _also_beside(table: Table) -> tuple[str, ...]:
    """The further metrics if they fit beside the figures; details() shows them otherwise."""
    return table.also if len(table.columns) * (2 + len(table.also)) < MAX_COLUMNS else ()


def _rows_title(spec: Spec) -> str:
    return ', '.join(spec.rows) if len(spec.rows) <= 2 else ARM


def comparisons(table: Table) -> list[list[str]]:
    """Header and a line per cell that is compared with the row `baseline` of its column."""
    spec = table.spec
    tested = bool(table.cells.p_holm.count())  # a single pair of runs has no test
    several = len(table.columns) > 1
    header = [_rows_title(spec), *[', '.join(spec.cols)] * several]
    header += [f'difference from {spec.baseline}', f'P(> {spec.baseline})', *[P_NAME] * tested]
    lines = [header]
    for i, column in enumerate(table.columns):
        for label, cells in table.lines():
            p = cells[i]['p_holm']
            texts = [_gain_text(cells[i], spec.metric), _better_text(cells[i])]
            texts += ['' if math.isnan(p) else f'{p:.3f}' if p >= 0.001 else '<0.001'] * tested
            if any(texts):
                lines.append([label, *[column] * several, *texts])
    return lines


def details(table: Table) -> list[list[str]]:
    """One line per cell: mean, standard deviation, further metrics, and the figure of each run."""
    spec = table.spec
    several = len(table.columns) > 1
    seeds = ', '.join(map(str, table.seeds))
    also = [name for name in table.also if name not in _also_beside(table)]
    header = [_rows_title(spec), *[', '.join(spec.cols)] * several, 'mean ± s.d. of runs']
    header += [*map(plain_name, also), f'runs of seeds {seeds}']
    lines = [header]
    for label, cells in table.lines():
        for cell in cells:
            column = cell['column']
            if cell['planned'] and column != OVERALL:
                entries = table.entries_of(label, column, cell['kind'])
                runs = [_entry_text(entry, spec) for entry in entries]
                runs += [f'{NOTHING} (seed {seed})' for seed in _missing_seeds(table, entries)]
                spread = number(spec.metric, cell['std'])
                mean = number(spec.metric, cell['mean']) + f' ± {spread}' * (spread != NOTHING)
                values = [number(name, cell[name]) for name in also]
                lines.append([label, *[column] * several, mean, *values, ', '.join(runs)])
    return lines


def notes(table: Table) -> list[str]:
    """The notes that apply to this table."""
    spec = table.spec
    unit = ' in per cent' if is_share(spec.metric) else ''
    kinds = set(table.cells.interval)
    lines = [
        f'`{spec.metric}`{unit} {PLACES[spec.at]}: interquartile mean over seeds (runs that count '
        '/ runs planned).'
    ]
    if _rows_title(spec) == ARM:
        lines.append(f'The arms differ in {", ".join(spec.rows)}.')
    if 'bootstrap' in kinds:
        lines.append(
            f'[ ]: 95 % bootstrap interval of the runs of a cell ({RESAMPLES:,} resamples). It is '
            'too short for few seeds: with normally distributed runs it covers the true value in '
            '76 % of cases with 3 seeds, 90 % with 5 and 93 % with 10.'
        )
    if 'wilson' in kinds:
        lines.append(f'{SINGLE}: one run; 95 % Wilson interval of its episodes.')
    if table.also:
        names = ', '.join(map(plain_name, table.also))
        place = 'in the same way' if spec.at in (LAST_THREE, AREA) else 'at the same step'
        lines.append(f'{names[0].upper()}{names[1:]}: mean over the same runs, {place}.')
    if spec.at == BEST:
        lines.append('The best step was chosen on the episodes it is reported on: biased upwards.')
    if table.tokens:
        each = ', '.join(f'{column} {count:,}' for column, count in table.tokens.items())
        lines.append(
            f'Sampled tokens: {each}. The run of a column with the fewest sampled tokens ends '
            f'there; other runs are {"summed up to" if spec.at == AREA else "read at"} that point, '
            'interpolated between validations.'
        )
    if spec.baseline:
        # A start is shared only if step 0 was measured and is equal.
        starts = [label for label, _ in table.lines(START)]
        shared = 'start, levels and noise' if starts == [LINE_NAMES[START]] else 'levels and noise'
        if starts and starts != [LINE_NAMES[START]]:
            shared += ', but not always the start'
        lines.append(
            f'P(> {spec.baseline}): share of pairs of runs that this row wins; ties count half. No '
            'interval if all resamples are equal.'
        )
        lines.append(
            f'Difference from {spec.baseline}: mean over pairs of runs of the same seed, which '
            f"share {shared}, with Student's 95 % interval."
        )
    if tests := int(table.cells.p_holm.count()):
        lines.append(
            f"{P_NAME}: two-sided paired Student's test of this difference, adjusted for the "
            f'{tests} test{"s" * (tests > 1)} of the table (Holm).'
        )
    if spec.margin:
        lines.append(
            f'{SAME}: the 90 % interval of the difference is within '
            f'±{number(spec.metric, spec.margin)} (two one-sided tests at 5 %).'
        )
    if spec.overall:
        lines.append(
            f'{OVERALL}: the runs of all columns, resampled within each, if all have the same '
            'number of runs.'
        )
    if table.lines(CLONE):
        lines.append(
            'Expert clone: no RL; behaviour cloning of any number of clean expert episodes, at the '
            f'cost given in {" and ".join(spec.clones)}.'
        )
    elif spec.clones and spec.metric == SUCCESS and spec.at != AREA:
        lines.append(f'No clone of {" and ".join(spec.clones)} has the observations of these runs.')
    if spec.where:
        chosen = '; '.join(f'{name} = {" or ".join(x)}' for name, x in spec.where.items())
        lines.append(f'Only runs with {chosen}.')
    return lines + _absent(table)


def is_share(metric: str) -> bool:
    return metric.endswith(SHARES)


def plain_name(metric: str) -> str:
    """'eval/valid_format' becomes 'valid format'."""
    return metric.split('/')[-1].replace('_', ' ')


def number(metric: str, value: float) -> str:
    """Shares in per cent with one decimal; other values with four digits."""
    if math.isnan(value):
        return NOTHING
    return f'{100 * value:.1f}' if is_share(metric) else f'{value:.4g}'


def published(spec: Spec, row: str, column: str) -> str:
    """The published figure for a cell, or ''."""
    return str(spec.published.get(row, {}).get(column, ''))


def _best(metric: str, cells: Sequence[Cell]) -> str:
    """The best figure of a column, formatted; '' for a single row or a metric without a best."""
    known = [cell['iqm'] for cell in cells if cell['kind'] == RUNS and cell['iqm'] == cell['iqm']]
    rated = metric.split('/')[-1] in MORE_IS_BETTER
    return number(metric, max(known)) if rated and len(known) > 1 else ''


def _figure_text(cell: Cell, metric: str, best: str) -> str:
    text, low, high = (number(metric, cell[name]) for name in ('iqm', 'low', 'high'))
    if cell['kind'] == RUNS and text == best:
        text = best.join(BOLD)
    if low != NOTHING:
        text += f' [{low}, {high}]' + SINGLE * (cell['interval'] == 'wilson')
    if not cell['planned']:
        return text
    more = f', {cell["unfinished"]} unfinished' * (cell['unfinished'] > 0)
    more += f', {cell["refused"]} rejected' * (cell['refused'] > 0)
    return f'{text} ({cell["runs"]}/{cell["planned"]}{more})'


def _better_text(cell: Cell) -> str:
    p, low, high = (cell[name] for name in ('p_better', 'p_low', 'p_high'))
    interval = '' if math.isnan(low) else f' [{low:.2f}, {high:.2f}]'
    return '' if math.isnan(p) else f'{p:.2f}{interval}'


def _gain_text(cell: Cell, metric: str) -> str:
    values = [cell[name] for name in ('gain', 'gain_low', 'gain_high')]
    mean, low, high = (('+' if x > 0 else '') + number(metric, x) for x in values)
    if math.isnan(values[0]):
        return ''
    text = mean if low == NOTHING else f'{mean} [{low}, {high}]'
    return f'{text} {SAME}' if cell['same'] else text


def _entry_text(entry: Entry, spec: Spec) -> str:
    text = number(spec.metric, entry['value'])
    if entry['fault']:
        return f'{NOTHING} (rejected)'
    return text if entry['finished'] else f'{text} ({_progress(entry)})'


def _progress(entry: Entry) -> str:
    has_started = not pd.isna(entry['step'])
    return f'at step {entry["step"]} of {entry["steps"]}' if has_started else 'not started'


def _missing_seeds(table: Table, entries: Sequence[Entry]) -> list[str]:
    known = {entry['seed'] for entry in entries}
    return [str(seed) for seed in table.seeds if seed not in known]


def _absent(table: Table) -> list[str]:
    """Notes on faulty and unfinished runs, and on seeds without a run."""
    refused, unfinished, missing = [], [], []
    for label, cells in table.lines(RUNS):
        for column in (cell['column'] for cell in cells if cell['column'] != OVERALL):
            place, entries = f'{label} / {column}', table.entries_of(label, column)
            for entry in entries:
                where = f'{place}, seed {entry["seed"]}'
                if entry['fault']:
                    refused.append(f'{where}: {entry["fault"]}')
                elif not entry['finished']:
                    unfinished.append(f'{where}, {_progress(entry)}')
            seeds = _missing_seeds(table, entries)
            missing += [f'{place} of seed {", ".join(seeds)}'] * bool(seeds)
    notes = {
        'Rejected, in no figure': refused,
        'Unfinished, not counted': unfinished,
        'Missing': missing,
    }
    return [f'{title}: {"; ".join(places)}.' for title, places in notes.items() if places]


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    escaped = [[_escape_markdown(text).replace('|', r'\|') for text in line] for line in lines]
    header, *body = [f'| {" | ".join(line)} |' for line in escaped]
    return '\n'.join([header, '|' + ' --- |' * len(lines[0]), *body]) + '\n'


def _escape_markdown(text: str) -> str:
    """Escape markup, links and line breaks in names of configs and folders."""
    text = re.sub(r'&(?=#?\w+;)', '&amp;', _one_line(text))
    return re.sub(r'<(?=[A-Za-z/!?])', '&lt;', text).replace('](', r']\(')


def _one_line(text: str) -> str:
    return ' '.join(text.splitlines())
