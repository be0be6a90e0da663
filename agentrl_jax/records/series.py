"""Data of learning curves: a metric of several seeds over steps, summarised and thinned out."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.measure import stats

MIN_BAND_SEEDS = 5  # bootstrap intervals of fewer seeds have too little coverage
FLAT = 1e-7  # a smaller range is rounding: its axis labels would be meaningless digits
LOG_RATIO = 10  # largest value / median; above it, a single spike fills a linear axis
PAD = 0.04  # of the range of y, above and below
TRIALS = ('first', 'second', 'third', 'fourth', 'fifth')
SUCCESSES = ('success', *(f'success_{trial}' for trial in TRIALS))
# Suffixes of metrics from 0 to 1.
SHARES = (*SUCCESSES, 'valid_format', 'pass_at_n', '_frac', '_actions', 'plan_followed')
Rows = Sequence[Mapping[str, float]]


class Curve(NamedTuple):
    """One label's seeds and their summary; low and high are None without an interval."""

    seeds: list[tuple[np.ndarray, np.ndarray]]  # (x, y) of each run with the metric
    x: np.ndarray  # [n]
    centre: np.ndarray  # [n]
    low: np.ndarray | None
    high: np.ndarray | None


class Panel(NamedTuple):
    """One pair of axes: the seeds of each label, and the values of reference lines."""

    title: str
    metric: str
    runs: Mapping[str, Sequence[Rows]]
    references: Mapping[str, float]
    unfinished: Mapping[str, Sequence[Rows]] = {}  # drawn, but excluded from summaries
    y_label: str = ''


def all_runs(panel: Panel) -> list[Rows]:
    """The rows of every run of a panel, finished or not."""
    groups = [*panel.runs.values(), *panel.unfinished.values()]
    return [rows for seeds in groups for rows in seeds]


def joined(panel: Panel, x: str, most: int) -> int:
    """Number of neighbouring values to average so that no run has more than `most` points."""
    longest = max((points(rows, panel.metric, x)[0].size for rows in all_runs(panel)), default=0)
    return max(1, -(-longest // most))


def summarise(
    runs: Sequence[Rows], metric: str, x: str, *, join: int = 1, most: int = 200
) -> Curve | None:
    """Return seeds and their summary; None if no run has the metric.

    Several seeds: the interquartile mean over the x range that all of them cover (linear
    interpolation); from MIN_BAND_SEEDS on, with a 95 % bootstrap interval. One seed: its logged
    Wilson interval. join: number of values per mean; most: maximum number of points.
    """
    seeds = [seed for rows in runs if (seed := points(rows, metric, x, join))[0].size]
    if not seeds:
        return None
    if len(seeds) == 1:
        rows = next(rows for rows in runs if points(rows, metric, x)[0].size)
        low, high = (points(rows, f'{metric}_{end}', x, join)[1] for end in ('low', 'high'))
        if low.size == high.size == seeds[0][0].size:
            return Curve(seeds, *seeds[0], low, high)
        return Curve(seeds, *seeds[0], None, None)
    # The points of all runs, thinned out, in the range that all runs cover.
    first, last = max(x[0] for x, _ in seeds), min(x[-1] for x, _ in seeds)
    at = np.unique(np.concatenate([x for x, _ in seeds]))
    at = at[(at >= first) & (at <= last)]
    at = np.linspace(first, last, most) if at.size > most else at
    values = np.stack([np.interp(at, *seed) for seed in seeds], axis=1)  # [n, seeds]
    if len(seeds) < MIN_BAND_SEEDS:
        return Curve(seeds, at, stats.iqm(values), None, None)
    bounds = [stats.stratified_bootstrap([point]) for point in values]
    low, high = np.array(bounds).reshape(-1, 2).T
    return Curve(seeds, at, stats.iqm(values), low, high)


def points(rows: Rows, metric: str, x: str, join: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of rows with finite values of both, sorted by x; means of `join` values each."""
    pairs = [(row[x], row[metric]) for row in rows if x in row and metric in row]
    table = np.array(pairs, np.float64).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    table = table[np.argsort(table[:, 0], kind='stable')]
    if join > 1 and len(table):
        starts = np.arange(0, len(table), join)
        counts = np.diff(starts, append=len(table))[:, None]
        table = np.add.reduceat(table, starts) / counts
    return table[:, 0], table[:, 1]


def y_range(panels: Sequence[Panel], x: str = 'step', join: int = 1) -> tuple[float, float]:
    """Limits that contain all seeds, single runs' intervals and references of the panels."""
    finite = _values(panels, x, join)
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    share = panels[0].metric.endswith(SHARES)
    if high - low < FLAT * max(1.0, abs(high)):
        half = 0.1 * max(1.0, abs(high))
        low, high = (0.0, 1.0) if share else (low - half, high + half)
    pad = PAD * (high - low)
    if share:
        return max(low - pad, -PAD / 2), min(high + pad, 1 + PAD)
    return low - pad, high + pad


def spiky(panel: Panel, x: str = 'step', join: int = 1) -> bool:
    """Whether a few values are so large that only a log axis can display the rest as well."""
    values = _values([panel], x, join)
    if panel.metric.endswith(SHARES) or not values.size or values.min() <= 0:
        return False
    return bool(values.max() > LOG_RATIO * np.median(values))


def _values(panels: Sequence[Panel], x: str, join: int) -> np.ndarray:
    """Every finite value in the panels."""
    names = {panel.metric + end for panel in panels for end in ('', '_low', '_high')}
    lines = [value for panel in panels for value in panel.references.values()]
    drawn = [
        points(rows, name, x, join)[1]
        for panel in panels
        for rows in all_runs(panel)
        for name in names
    ]
    values = np.concatenate([np.array(lines, np.float64), *drawn])
    return values[np.isfinite(values)]
