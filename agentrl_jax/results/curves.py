"""Learning curves of a table: one panel per column, one colour per row.

With many rows, plots.draw makes small multiples: a line of panels per row.
"""

from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.records import plots, series
from agentrl_jax.results.cells import ORACLE, OVERALL, RANDOM, RUNS, SUCCESS, Table
from agentrl_jax.results.render import plain_name
from agentrl_jax.results.runs import AXES

MAX_COLUMNS = 3


def write(table: Table, folder: Path, endings: Sequence[str] = plots.ENDINGS) -> list[Path]:
    """Write curves_step, curves_tokens, curves_seconds and signals (or signals_<name>).

    Axes without data are left out. Seconds are left out unless all runs were trained on one known
    machine, since they would compare machines (a run that moved has 'a; b'). Panels of the table's
    metric share one y range. Signals differ in size between environments, so their panels do not.
    """
    panels = _panels(table, table.spec.metric)
    limits = {table.spec.metric: series.y_range(panels)}
    columns = _columns(len(panels))
    runs = [run for members in table.runs.values() for run in members if run.rows]
    machines = {run.machine for run in runs}
    one_machine = len(machines) == 1 and not any(x == '' or '; ' in x for x in machines)
    written = []
    for axis in AXES:
        known = any(row.get(axis) for run in runs for row in run.rows)
        if known and (axis != 'seconds' or one_machine):
            stem = folder / f'curves_{axis}'
            written += plots.draw(
                panels, stem, x=axis, columns=columns, limits=limits, endings=endings
            )
    return [*written, *_write_signals(table, folder, endings)] if runs else written


def _write_signals(table: Table, folder: Path, endings: Sequence[str]) -> list[Path]:
    """Draw all signals in one figure; small multiples with several columns get one per signal."""
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
    columns = len(panels) // len(of_signal)  # one line per signal
    if not several:  # name the panel after the signal, not the single column
        panels = [p._replace(title=plain_name(p.metric), y_label='') for p in panels]
        columns = _columns(len(panels))
    stem = folder / 'signals'
    return list(plots.draw(panels, stem, x='step', columns=columns, endings=endings))


def _columns(panels: int) -> int:
    return 2 if panels in (2, 4) else min(panels, MAX_COLUMNS)


def _panels(table: Table, metric: str) -> list[series.Panel]:
    """One panel per column; unfinished and missing runs are separate."""
    panels = []
    for i, column in enumerate(table.columns):
        if column == OVERALL:
            continue
        finished, unfinished = {}, {}
        for label, cells in table.lines(RUNS):
            runs = table.runs.get((label, column), ())
            state = {e['run']: e['finished'] for e in table.entries_of(label, column)}
            finished[label] = [run.rows for run in runs if state[run.name]]
            unfinished[label] = [run.rows for run in runs if not state[run.name]]
            unfinished[label] += [[]] * (cells[i]['planned'] - len(runs))
        title, label = (column, plain_name(metric)) if table.spec.cols else (plain_name(metric), '')
        references = {}  # random play and the oracle, per row if they differ
        if metric == SUCCESS:
            references = {name: x[i]['mean'] for name, x in table.lines(RANDOM, ORACLE)}
        panels.append(series.Panel(title, metric, finished, references, unfinished, label))
    return panels
