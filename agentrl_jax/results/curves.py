"""Learning curves of a table: a panel for each column, a colour for each row.

With many rows plots.draw makes small multiples of them, a line of panels for each row.
"""

from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.records import plots, series
from agentrl_jax.results.cells import OVERALL, SUCCESS, Table
from agentrl_jax.results.render import plain_name
from agentrl_jax.results.runs import AXES

MAX_COLUMNS = 3


def write(table: Table, folder: Path, endings: Sequence[str] = plots.ENDINGS) -> list[Path]:
    """curves_step, curves_tokens, curves_seconds and signals (or signals_<name>), in these formats.

    An axis that no run knows is left out, and seconds unless all runs were trained on one machine
    and it is known: else they compare machines. Panels of the table's metric have one range of y;
    those of signals, whose size differs by environment, have their own.
    """
    panels = _panels(table, table.spec.metric)
    limits = {table.spec.metric: series.y_range(panels)}
    columns = _columns(len(panels))
    rows = [row for runs in table.runs.values() for run in runs for row in run.rows]
    written = []
    for axis in AXES:
        known = any(axis in row and row[axis] for row in rows)
        if known and (axis != 'seconds' or _one_machine(table)):
            stem = folder / f'curves_{axis}'
            written += plots.draw(
                panels, stem, x=axis, columns=columns, limits=limits, endings=endings
            )
    return [*written, *_write_signals(table, folder, endings)] if rows else written


def _write_signals(table: Table, folder: Path, endings: Sequence[str]) -> list[Path]:
    """One figure of all signals; of small multiples with several columns, one for each signal."""
    of_signal = {name: _panels(table, name) for name in table.spec.signals}
    panels = [panel for found in of_signal.values() for panel in found]
    if not panels:
        return []
    several = any(len(found) > 1 for found in of_signal.values())
    if several and max(len(panel.runs) for panel in panels) > plots.MAX_TOGETHER:
        drawn = []
        for name, found in of_signal.items():
            stem = folder / f'signals_{name.split("/")[-1]}'
            drawn += plots.draw(found, stem, x='step', columns=len(found), endings=endings)
        return drawn
    columns = len(panels) // len(of_signal)  # a line a signal
    if not several:  # its name says more than that of the one column
        panels = [p._replace(title=plain_name(p.metric), y_label='') for p in panels]
        columns = _columns(len(panels))
    stem = folder / 'signals'
    return list(plots.draw(panels, stem, x='step', columns=columns, endings=endings))


def _one_machine(table: Table) -> bool:
    """Several machines of one run are noted as 'a; b'."""
    machines = {run.machine for runs in table.runs.values() for run in runs if run.rows}
    return len(machines) == 1 and not any(name == '' or '; ' in name for name in machines)


def _columns(panels: int) -> int:
    return 2 if panels in (2, 4) else min(panels, MAX_COLUMNS)


def _panels(table: Table, metric: str) -> list[series.Panel]:
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
            series.Panel(title, metric, finished, _references(table, metric, i), unfinished, label)
        )
    return panels


def _references(table: Table, metric: str, column: int) -> dict[str, float]:
    """Random play and the oracle, of each row where rows differ."""
    if metric != SUCCESS:
        return {}
    lines: Sequence = [line for line in table.lines if line.kind in ('random', 'oracle')]
    return {line.label: line.cells[column].figure.mean for line in lines}
