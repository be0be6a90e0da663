"""Learning curves of a table: one panel per column, one colour per row.

With many rows, plots.draw makes small multiples: a line of panels per row.
"""

import functools

from agentrl_jax.records import plots, series
from agentrl_jax.results.cells import ORACLE, OVERALL, RANDOM, RUNS, SUCCESS, Table
from agentrl_jax.results.render import plain_name
from agentrl_jax.results.runs import AXES

MAX_COLUMNS = 3


def figures(table: Table) -> dict[str, plots.Draw]:
    """Return curves_step, curves_tokens and signals (or signals_<name>).

    An axis is omitted if no run recorded it. Panels of the table's metric share a y range. Signals
    differ in size between environments, so each panel has its own range.
    """
    if not table.spec.curves:
        return {}
    panels = _panels(table, table.spec.metric)
    limits = {table.spec.metric: series.y_range(panels)}
    runs = [run for members in table.runs.values() for run in members if run.rows]
    drawings = {}
    for axis in AXES:
        if any(row.get(axis) for run in runs for row in run.rows):
            drawings[f'curves_{axis}'] = functools.partial(
                plots.draw, panels, x=axis, columns=_columns(len(panels)), limits=limits
            )
    return drawings | _signals(table) if runs else drawings


def _signals(table: Table) -> dict[str, plots.Draw]:
    """One figure of all signals, or one per signal for small multiples with several columns."""
    of_signal = {name: _panels(table, name) for name in table.spec.signals}
    panels = [panel for group in of_signal.values() for panel in group]
    if not panels:
        return {}
    several = any(len(group) > 1 for group in of_signal.values())
    if several and max(len(panel.runs) for panel in panels) > plots.MAX_TOGETHER:
        return {
            f'signals_{name.split("/")[-1]}': functools.partial(
                plots.draw, group, x='step', columns=len(group)
            )
            for name, group in of_signal.items()
        }
    columns = len(panels) // len(of_signal)  # one line per signal
    if not several:  # name the panel after the signal, not the single column
        panels = [p._replace(title=plain_name(p.metric), y_label='') for p in panels]
        columns = _columns(len(panels))
    return {'signals': functools.partial(plots.draw, panels, x='step', columns=columns)}


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
