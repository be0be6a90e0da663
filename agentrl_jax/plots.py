"""Learning curves as PNG and SVG: thin seeds, their mean with an interval, reference lines."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from agentrl_jax import stats
from agentrl_jax.run_log import read_metrics

# Okabe and Ito's colours: told apart by colour-blind readers too; grey is for references.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
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
AXIS_LABELS = {'time_s': 'seconds', 'step': 'step'}
Rows = Sequence[Mapping[str, float]]


class Curve(NamedTuple):
    """One label's seeds and their summary; low and high are None when there is no interval."""

    seeds: list[tuple[np.ndarray, np.ndarray]]  # (x, y) of each run that has the metric
    x: np.ndarray  # [n]
    centre: np.ndarray  # [n]
    low: np.ndarray | None
    high: np.ndarray | None


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
    columns = 2 if len(metrics) in (2, 4) else min(len(metrics), 3)
    lines = -(-len(metrics) // columns)
    # A Figure without pyplot: no global state, no display, Agg for the PNG.
    with matplotlib.rc_context(STYLE):
        size = (6.4, 4.4) if columns == 1 else (4.2 * columns, 3.1 * lines + 0.5)
        figure = Figure(figsize=size, layout='constrained')
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        shaded = False
        for panel, metric in zip(axes, metrics, strict=False):
            shaded |= _draw_panel(panel, rows, metric, x, statistic)
            if references and metric in references:
                _draw_references(panel, references[metric])
            if metric.endswith(SHARES):  # after the references: fixed limits no longer follow
                low, high = panel.get_ylim()
                panel.set_ylim(max(low, -0.02), min(high, 1.04))
        for unused in axes[len(metrics) :]:
            unused.set_visible(False)
        most_seeds = max(len(seeds) for seeds in rows.values())
        figure.legend(
            *axes[0].get_legend_handles_labels(), title=_explain(statistic, most_seeds, shaded),
            loc='outside lower center', ncols=3, title_fontsize=9,
        )  # fmt: skip
        if title:
            figure.suptitle(title)
        return _save(figure, Path(stem))


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
    panel: Axes,
    runs: Mapping[str, Sequence[Rows]],
    metric: str,
    x: str,
    statistic: str,
) -> bool:
    """Draws all labels; returns whether any of them has an interval."""
    shaded = False
    for index, (label, seeds) in enumerate(runs.items()):
        curve = summarise(seeds, metric, x, statistic)
        found = len(curve.seeds) if curve else 0
        count = f'n = {found}' if found == len(seeds) else f'n = {found} of {len(seeds)}'
        colour = COLOURS[index % len(COLOURS)]
        if not curve:  # a missing run is shown, not dropped
            panel.plot([], [], color=colour, label=f'{label} ({count})')
            continue
        if found > 1:
            for seed in curve.seeds:
                panel.plot(*seed, color=colour, linewidth=0.7, alpha=0.45)
        if curve.low is not None:
            shaded = True
            panel.fill_between(
                curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0
            )
        marker = 'o' if curve.x.size == 1 else None
        panel.plot(
            curve.x, curve.centre, color=colour, linewidth=2, marker=marker,
            label=f'{label} ({count})', zorder=3,
        )  # fmt: skip
    panel.set_title(metric)
    panel.set_xlabel(AXIS_LABELS[x] if x in AXIS_LABELS else x)
    return shaded


def _draw_references(panel: Axes, references: Mapping[str, float]) -> None:
    for index, (name, value) in enumerate(references.items()):
        style = REFERENCE_STYLES[index % len(REFERENCE_STYLES)]
        panel.axhline(value, color=REFERENCE_COLOUR, linewidth=1, linestyle=style)
        # Fractions of the axes across, data upwards: the label sits on its line's right end.
        panel.annotate(
            f'{name} {value:.3g}', (1, value), xycoords=panel.get_yaxis_transform(),
            xytext=(-2, 2), textcoords='offset points', ha='right', va='bottom',
            fontsize=8, color=REFERENCE_COLOUR,
        )  # fmt: skip


def _explain(statistic: str, most_seeds: int, shaded: bool) -> str:
    if most_seeds < 2:
        return 'shade: 95 % Wilson interval of the validation' if shaded else ''
    name = {'mean': 'mean', 'iqm': 'interquartile mean'}[statistic]
    return f'thin: seeds   thick: {name}   shade: 95 % bootstrap interval'


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
