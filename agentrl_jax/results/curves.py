"""Learning curves of a table: a panel for each column, a colour for each row."""

from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.records import plots
from agentrl_jax.results.cells import OVERALL, SUCCESS, Table
from agentrl_jax.results.render import plain_name
from agentrl_jax.results.runs import AXES

MAX_COLUMNS = 3


def write(table: Table, folder: Path) -> list[Path]:
    """curves_step, curves_tokens, curves_seconds and signals, each .png and .svg.

    An axis that no run knows is left out. Panels of the table's metric have one range of y; those
    of signals, whose size differs by environment, have their own.
    """
    panels = _panels(table, table.spec.metric)
    limits = {table.spec.metric: plots.y_range(panels)}
    columns = _columns(len(panels))
    rows = [row for runs in table.runs.values() for run in runs for row in run.rows]
    written = []
    for axis in AXES:
        if any(axis in row and row[axis] for row in rows):
            stem = folder / f'curves_{axis}'
            written += plots.draw(panels, stem, x=axis, columns=columns, limits=limits)
    if table.spec.signals and rows:
        of_signal = [_panels(table, name) for name in table.spec.signals]
        panels = [panel for found in of_signal for panel in found]
        if len(of_signal[0]) > 1:
            columns = len(of_signal[0])  # a line a signal
        else:  # its name says more than that of the one column
            panels = [p._replace(title=plain_name(p.metric), y_label='') for p in panels]
            columns = _columns(len(panels))
        stem = folder / 'signals'
        written += plots.draw(panels, stem, x='step', columns=columns)
    return written


def _columns(panels: int) -> int:
    return 2 if panels in (2, 4) else min(panels, MAX_COLUMNS)


def _panels(table: Table, metric: str) -> list[plots.Panel]:
    """One a column; runs that are not finished, or not begun, are kept apart or counted."""
    lines = [line for line in table.lines if line.kind == 'runs']
    panels = []
    for i, column in enumerate(table.columns):
        if column == OVERALL:
            continue
        finished, unfinished = {}, {}
        for line in lines:
            cell = line.cells[i]
            runs = table.runs[line.label, column] if (line.label, column) in table.runs else ()
            state = {entry.run: entry.finished for entry in cell.entries}
            finished[line.label] = [run.rows for run in runs if state[run.name]]
            unfinished[line.label] = [run.rows for run in runs if not state[run.name]]
            unfinished[line.label] += [[]] * (cell.planned - len(runs))
        title, label = (column, plain_name(metric)) if table.spec.cols else (plain_name(metric), '')
        panels.append(
            plots.Panel(title, metric, finished, _references(table, metric, i), unfinished, label)
        )
    return panels


def _references(table: Table, metric: str, column: int) -> dict[str, float]:
    """Random play and the oracle, of each row where rows differ."""
    if metric != SUCCESS:
        return {}
    lines: Sequence = [line for line in table.lines if line.kind in ('random', 'oracle')]
    return {line.label: line.cells[column].figure.mean for line in lines}
