"""Learning curves as PNG and SVG: thin seeds, their mean with an interval, reference lines."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from agentrl_jax.measure import stats
from agentrl_jax.records.run_log import read_metrics

# Okabe and Ito's colours: told apart by colour-blind readers too; grey is for references.
# More labels than colours: the same colours again in another dash.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
DASHES = ('-', (0, (4, 1.2)), (0, (1, 1)))
REFERENCE_COLOUR = '#555555'
REFERENCE_STYLES = ('--', ':', '-.')
GRID_POINTS = 200
STATISTICS = {'mean': stats.mean, 'iqm': stats.iqm}
STYLE = {
    'svg.hashsalt': 'agentrl_jax',  # otherwise ids, and so the bytes, are random
    'font.family': 'DejaVu Sans',  # comes with matplotlib
    'font.size': 10,
    'axes.titlesize': 11,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': '#e6e6e6',
    'legend.frameon': False,
    'legend.fontsize': 9,
}
SHARES = ('success', 'valid_format', 'pass_at_n', '_frac', '_actions')  # metrics from 0 to 1
AXIS_LABELS = {'time_s': 'seconds', 'tokens': 'tokens sampled'}
NAMES_APART = 0.06  # of the range of the lines across a panel
PAD = 0.04  # of the range of y, above and below
Rows = Sequence[Mapping[str, float]]


class Curve(NamedTuple):
    """One label's seeds and their summary; low and high are None when there is no interval."""

    seeds: list[tuple[np.ndarray, np.ndarray]]  # (x, y) of each run that has the metric
    x: np.ndarray  # [n]
    centre: np.ndarray  # [n]
    low: np.ndarray | None
    high: np.ndarray | None


class Panel(NamedTuple):
    """One pair of axes: for each label its seeds, and values of lines across it."""

    title: str
    metric: str
    runs: Mapping[str, Sequence[Rows]]
    references: Mapping[str, float]
    unfinished: Mapping[str, Sequence[Rows]] = {}  # drawn, and in no summary
    y_label: str = ''


def learning_curves(
    runs: Mapping[str, Sequence[str | os.PathLike | Rows]],
    stem: str | os.PathLike,
    *,
    metrics: Sequence[str] = ('eval/success',),
    x: str = 'step',
    references: Mapping[str, Mapping[str, float]] | None = None,
    statistic: str = 'iqm',
    title: str = '',
) -> tuple[Path, Path]:
    """Draws one panel per metric and writes stem.png and stem.svg; the same input, the same bytes.

    runs: for each label its seeds, as paths of metrics.jsonl or as rows. references: for a metric
    the values of lines across its panel, such as {'eval/success': {'random': 0.19}}. x: 'step',
    'time_s' or a metric.
    """
    if not metrics or not any(runs.values()):
        raise ValueError('learning_curves needs at least one metric and one run')
    rows = {
        label: [read_metrics(seed) if isinstance(seed, (str, os.PathLike)) else seed for seed in s]
        for label, s in runs.items()
    }
    lines = references or {}
    panels = [Panel(name, name, rows, lines[name] if name in lines else {}) for name in metrics]
    columns = 2 if len(metrics) in (2, 4) else min(len(metrics), 3)
    return draw(panels, stem, x=x, columns=columns, statistic=statistic, title=title)


def draw(
    panels: Sequence[Panel],
    stem: str | os.PathLike,
    *,
    x: str,
    columns: int,
    statistic: str = 'iqm',
    title: str = '',
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[Path, Path]:
    """Panels row by row with one legend, as stem.png and stem.svg; limits: y range of a metric."""
    lines = -(-len(panels) // columns)
    # A Figure without pyplot: no global state, no display, Agg for the PNG.
    with matplotlib.rc_context(STYLE):
        size = (6.4, 4.4) if len(panels) == 1 else (4.2 * columns, 3.1 * lines + 0.5)
        figure = Figure(figsize=size, layout='constrained')
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        drawn = [
            _draw_panel(a, panel, x, statistic) for a, panel in zip(axes, panels, strict=False)
        ]
        for axis, panel in zip(axes, panels, strict=False):
            low, high = axis.get_ylim()
            if limits and panel.metric in limits:
                axis.set_ylim(*limits[panel.metric])
            elif panel.metric.endswith(SHARES):
                axis.set_ylim(max(low, -PAD / 2), min(high, 1 + PAD))
        for unused in axes[len(panels) :]:
            unused.set_visible(False)
        shades = set().union(*(found for found, _ in drawn))
        figure.legend(
            *_legend(axes[: len(panels)], drawn),
            loc='outside lower center',
            ncols=3,
            title=_explain(statistic, shades, panels),
            title_fontsize=9,
        )
        if title:
            figure.suptitle(title)
        return _save(figure, Path(stem))


def y_range(panels: Sequence[Panel]) -> tuple[float, float]:
    """Limits that hold all seeds, single runs' intervals and references of some panels."""
    names = {panel.metric + end for panel in panels for end in ('', '_low', '_high')}
    values = [value for panel in panels for value in panel.references.values()]
    for panel in panels:
        every = [*panel.runs.values(), *panel.unfinished.values()]
        values += [
            row[name]
            for seeds in every
            for rows in seeds
            for row in rows
            for name in names & row.keys()
        ]
    finite = [value for value in values if np.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    pad = PAD * ((high - low) or abs(high) or 1.0)
    if panels[0].metric.endswith(SHARES):
        return max(low - pad, -PAD / 2), min(high + pad, 1 + PAD)
    return low - pad, high + pad


def summarise(runs: Sequence[Rows], metric: str, x: str, statistic: str) -> Curve | None:
    """Seeds and their summary; None when no run has the metric.

    Several seeds: the statistic with its 95 % bootstrap interval where all of them have values
    (linear interpolation between them). One seed: its own Wilson interval where it was logged.
    """
    seeds = [seed for seed in (_series(rows, metric, x) for rows in runs) if seed[0].size]
    if not seeds:
        return None
    if len(seeds) == 1:
        rows = next(rows for rows in runs if _series(rows, metric, x)[0].size)
        low, high = (_series(rows, f'{metric}_{end}', x)[1] for end in ('low', 'high'))
        if low.size == high.size == seeds[0][0].size:
            return Curve(seeds, *seeds[0], low, high)
        return Curve(seeds, *seeds[0], None, None)
    at = _common_grid([seed[0] for seed in seeds])
    values = np.stack([np.interp(at, *seed) for seed in seeds], axis=1)  # [n, seeds]
    function = STATISTICS[statistic]
    bounds = [stats.stratified_bootstrap([point], function) for point in values]
    low, high = np.array(bounds).reshape(-1, 2).T
    return Curve(seeds, at, function(values), low, high)


def _series(rows: Rows, metric: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of the rows that have both as finite numbers, by rising x."""
    points = [(row[x], row[metric]) for row in rows if x in row and metric in row]
    table = np.array(points, np.float64).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    table = table[np.argsort(table[:, 0], kind='stable')]
    return table[:, 0], table[:, 1]


def _common_grid(xs: Sequence[np.ndarray]) -> np.ndarray:
    """The points of all runs (thinned out) where all runs have values."""
    low, high = max(x[0] for x in xs), min(x[-1] for x in xs)
    points = np.unique(np.concatenate(xs))
    points = points[(points >= low) & (points <= high)]
    return np.linspace(low, high, GRID_POINTS) if points.size > GRID_POINTS else points


def _draw_panel(
    axis: Axes, panel: Panel, x: str, statistic: str
) -> tuple[set[str], dict[str, str]]:
    """Draws all labels; returns which kinds of intervals they have, and how many seeds each."""
    shades, counts = set(), {}
    for index, (label, seeds) in enumerate(panel.runs.items()):
        curve = summarise(seeds, panel.metric, x, statistic)
        partial = panel.unfinished[label] if label in panel.unfinished else ()
        found, planned = len(curve.seeds) if curve else 0, len(seeds) + len(partial)
        counts[label] = f'{found}' if found == planned else f'{found} of {planned}'
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        for rows in partial:
            axis.plot(*_series(rows, panel.metric, x), color=colour, linewidth=0.7, linestyle=':')
        if not curve:  # a missing run is shown, not dropped
            axis.plot([], [], color=colour, linestyle=dash, label=label)
            continue
        if found > 1:
            for seed in curve.seeds:
                axis.plot(*seed, color=colour, linewidth=0.7, alpha=0.45, linestyle=dash)
        if curve.low is not None:
            shades.add('bootstrap' if found > 1 else 'Wilson')
            axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        marker = 'o' if curve.x.size == 1 else None
        axis.plot(
            curve.x,
            curve.centre,
            color=colour,
            linewidth=2,
            marker=marker,
            linestyle=dash,
            label=label,
            zorder=3,
        )
    axis.set_title(panel.title)
    axis.set_xlabel(AXIS_LABELS[x] if x in AXIS_LABELS else x)
    axis.set_ylabel(panel.y_label)
    if x == 'tokens':
        axis.xaxis.set_major_formatter(EngFormatter(sep=' '))
    _draw_references(axis, panel.references)
    return shades, counts


def _legend(axes: Sequence[Axes], drawn: Sequence[tuple[set[str], dict[str, str]]]) -> tuple:
    """(lines, texts) of all labels; where panels have different numbers of seeds, all of them."""
    lines, counts = {}, {}
    for axis, (_, found) in zip(axes, drawn, strict=True):
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
            counts.setdefault(label, []).append(found[label])
    texts = [
        f'{label} (n = {found[0] if len(set(found)) == 1 else " | ".join(found)})'
        for label, found in counts.items()
    ]
    return list(lines.values()), texts


def _draw_references(panel: Axes, references: Mapping[str, float]) -> None:
    """Lines across a panel; of many, those have a name that stand apart from the next below."""
    values = [value for value in references.values() if np.isfinite(value)] or [0.0]
    apart, named = NAMES_APART * (max(values) - min(values)), -np.inf
    lines = sorted(references.items(), key=lambda line: line[1])
    for index, (name, value) in enumerate(lines):
        style = REFERENCE_STYLES[index % len(REFERENCE_STYLES)]
        panel.axhline(value, color=REFERENCE_COLOUR, linewidth=1, linestyle=style)
        if value - named < apart:
            continue
        named = value
        # Fractions of the axes across, data upwards: the label sits on its line's right end.
        panel.annotate(
            f'{name} {value:.3g}',
            (1, value),
            xycoords=panel.get_yaxis_transform(),
            xytext=(-2, 2),
            textcoords='offset points',
            ha='right',
            va='bottom',
            fontsize=8,
            color=REFERENCE_COLOUR,
            zorder=4,
            bbox={'facecolor': 'white', 'alpha': 0.6, 'edgecolor': 'none', 'pad': 0.5},
        )


def _explain(statistic: str, shades: set[str], panels: Sequence[Panel]) -> str:
    """What the lines and shades mean that are there."""
    seeds = max(len(found) for panel in panels for found in panel.runs.values())
    name = {'mean': 'mean', 'iqm': 'interquartile mean'}[statistic]
    parts = ['thin: seeds', f'thick: {name}'] if seeds > 1 else []
    if shades == {'bootstrap', 'Wilson'}:
        parts.append('shade: 95 % bootstrap interval, of one seed Wilson')
    elif shades:
        of_what = ' of the validation' if shades == {'Wilson'} else ''
        parts.append(f'shade: 95 % {min(shades)} interval{of_what}')
    if any(found for panel in panels for found in panel.unfinished.values()):
        parts.append('dotted: unfinished, in no summary')
    return '   '.join(parts)


def _save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Writes both files next to their final place first, so that no half-written one is left."""
    written = []
    # No date and no version of matplotlib inside.
    for ending, metadata in (('png', {'Software': None}), ('svg', {'Date': None, 'Creator': None})):
        path = stem.with_name(f'{stem.name}.{ending}')
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f'{path.name}.tmp')
        figure.savefig(partial, format=ending, dpi=150, metadata=metadata)
        os.replace(partial, path)
        written.append(path)
    return written[0], written[1]
