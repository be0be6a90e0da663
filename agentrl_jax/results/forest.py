"""Forest plot of a table: differences from the baseline, paired by seed."""

import functools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentrl_jax.records import plots
from agentrl_jax.results.cells import Table
from agentrl_jax.results.render import is_share, plain_name

STEM = 'forest'
ROW_HEIGHT, LEFT, WIDTH = 0.24, 40, 6.4  # inches, letters of a row's name, inches
MARGIN_COLOUR = '#e6e6e6'
GAIN = ['gain', 'gain_low', 'gain_high']


class Difference(NamedTuple):
    """The difference of one row in one column; low and high are nan for one pair of runs."""

    row: str
    mean: float
    low: float
    high: float


def differences(table: Table) -> dict[str, list[Difference]]:
    """The compared rows of each column, from top to bottom; shares in per cent."""
    unit = 100 if is_share(table.spec.metric) else 1
    compared = table.cells[table.cells.gain.notna()]
    by_column = {
        column: [
            Difference(label, *(unit * value for value in values))
            for label, *values in cells[['row', *GAIN]].itertuples(index=False)
        ]
        for column, cells in compared.groupby('column', sort=False)
    }
    return {column: by_column[column] for column in table.columns if column in by_column}


def figures(table: Table) -> dict[str, plots.Draw]:
    """Return the forest plot, with a panel per column and a line per row; {} without a baseline."""
    panels, spec = differences(table), table.spec
    if not panels:
        return {}
    unit = 100 if is_share(spec.metric) else 1
    what = f'{plain_name(spec.metric)}: difference from {spec.baseline}' + ', points' * (
        unit == 100
    )
    titled = panels if spec.cols else dict(zip([''], panels.values(), strict=True))
    return {STEM: functools.partial(draw, titled, what=what, unit=unit, margin=spec.margin)}


def draw(
    panels: Mapping[str, Sequence[Difference]],
    path: Path,
    *,
    what: str,
    endings: Sequence[str] = plots.ENDINGS,
    unit: float = 100,
    margin: float = 0.0,
) -> list[Path]:
    """Write path.<ending> from panels by title. unit: 100 if values are in percentage points."""
    heights = [len(rows) + 1 for rows in panels.values()]
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(layout='constrained')
        figure.set_size_inches(WIDTH, ROW_HEIGHT * sum(heights) + 0.3 * len(panels) + 0.8)
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
        for axis, (column, rows) in zip(axes[:, 0], panels.items(), strict=True):
            _draw(axis, rows, unit * margin)
            axis.set_title(column)
        values = [x for rows in panels.values() for row in rows for x in row[1:]]
        axes[0, 0].set_xlim(*_range([*values, unit * margin, -unit * margin], unit))
        parts = ['mean of runs of one seed', "95 % Student's interval"]
        parts += [f'grey: ±{unit * margin:g}'] * bool(margin)
        figure.supxlabel(f'{what}\n{"   ".join(parts)}', fontsize=9)
        return list(plots.save(figure, path, endings))


def _draw(axis: Axes, rows: Sequence[Difference], margin: float) -> None:
    """Draw the rows, the first at the top."""
    colour = plots.COLOURS[0]
    if margin:
        axis.axvspan(-margin, margin, color=MARGIN_COLOUR, linewidth=0, zorder=0)
    axis.axvline(0, color=plots.REFERENCE_COLOUR, linewidth=1, zorder=1)
    for y, row in enumerate(rows):
        axis.plot([row.low, row.high], [y, y], color=colour, linewidth=1.5, zorder=2)
        axis.plot(row.mean, y, 'o', color=colour, markersize=5, zorder=3)
    names = [textwrap.shorten(row.row, LEFT, placeholder=' …') for row in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(visible=False, axis='y')
    axis.set_axisbelow(True)
    axis.tick_params(axis='y', length=0, labelsize=9)
    axis.spines['left'].set_visible(False)


def _range(values: Sequence[float], unit: float) -> tuple[float, float]:
    """Limits that contain all values and 0; shares are clipped at +-100 points."""
    finite = [0.0, *(value for value in values if math.isfinite(value))]
    low, high = min(finite), max(finite)
    if unit == 100:
        low, high = max(low, -100), min(high, 100)
    pad = 0.04 * (high - low) or 1.0
    return low - pad, high + pad
