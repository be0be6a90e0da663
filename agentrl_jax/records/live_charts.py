"""Small SVG charts of a live page. Their colours are in its style sheet."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import LogLocator, MaxNLocator

from agentrl_jax.records.markup import escape
from agentrl_jax.records.series import (
    FLAT,
    PAD,
    SHARES,
    Panel,
    Rows,
    joined,
    points,
    spiky,
    y_range,
)

WIDTH, HEIGHT = 340, 180  # of a chart, in its own units
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22  # margins; long labels widen the left one
CHARACTER = 6.2  # width of a letter
LARGER = 1.7  # factor of text in a wide chart on a narrow screen
MAX_POINTS = 160  # maximum points per line
TICKS = 5  # maximum intervals per axis
SPARK = (110, 20)  # size of a line without axes


def short(value: float, digits: int = 3) -> str:
    """'0.25', '12k', '1.5G', '3e-05', with `digits` significant digits."""
    for power, letter, least in ((9, 'G', 1e9), (6, 'M', 1e6), (3, 'k', 1e4)):
        if least <= abs(value) < math.inf:
            return f'{value / 10**power:.{digits}g}{letter}'
    return f'{value:.{max(digits, 4) if abs(value) >= 1000 else digits}g}'


def ticks(low: float, high: float, log: bool = False) -> dict[float, str]:
    """Values of an axis and their labels, which differ from each other."""
    locator = LogLocator() if log else MaxNLocator(TICKS, steps=(1, 2, 5, 10))
    values = [x for x in locator.tick_values(low, high) if low <= x <= high] or [low, high]
    for digits in range(3, 9):
        labels = [short(value, digits) for value in values]
        if len(set(labels)) == len(values):
            break
    return dict(zip(values, labels, strict=True))


def chart(
    rows: Rows,
    metric: str,
    *,
    x: str = 'step',
    references: Mapping[str, float] | None = None,
    others: Sequence[tuple[str, Rows]] = (),
    wide: bool = False,
) -> Markup:
    """Draw one metric over x; '' if it was not measured.

    references: values of horizontal lines. others: (CSS class, rows) of other runs. Metrics with
    `_low` and `_high` have a band.
    """
    lines = references or {}
    runs = {f'other {css}': more for css, more in others} | {'own': rows}
    panel = Panel('', metric, {css: [run] for css, run in runs.items()}, lines)
    join = joined(panel, x, MAX_POINTS)
    curves = {css: points(run, metric, x, join) for css, run in runs.items()}
    xs, heights = map(np.concatenate, zip(*curves.values(), strict=True))
    if not xs.size:
        return Markup()
    at, values = curves['own']
    log = not others and not lines and spiky(panel, x, join)
    if metric.endswith(SHARES):
        low, high = y_range([panel], x, join)
    else:
        low, high = limits(np.concatenate([heights, [*lines.values()]]), log)
    first, last = float(xs.min()), float(max(xs.max(), xs.min() + (xs.min() == xs.max())))
    size, width = (LARGER, 2 * WIDTH) if wide else (1.0, WIDTH)
    y_ticks = ticks(low, high, log)
    left = max(LEFT, 8 + size * CHARACTER * max(map(len, y_ticks.values())))
    bottom, right = HEIGHT - BOTTOM, width - RIGHT
    scale = np.log10 if log else np.asarray

    def across(value: np.ndarray | float) -> np.ndarray:
        return left + (np.asarray(value) - first) / (last - first) * (right - left)

    def up(value: np.ndarray | float) -> np.ndarray:
        return bottom - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (bottom - TOP)

    parts = []
    for value, label in y_ticks.items():
        parts.append(f'<path class="grid" d="M{left:.1f} {up(value):.1f}H{right}"/>')
        parts.append(f'<text class="y" x="{left - 5:.1f}" y="{up(value) + 3.5:.1f}">{label}</text>')
    for value, label in ticks(first, last).items():
        place = min(across(value), width - CHARACTER * len(label) / 2)
        parts.append(f'<text class="x" x="{place:.1f}" y="{HEIGHT - 6}">{label}</text>')
    for value in lines.values():
        parts.append(f'<path class="reference" d="M{left:.1f} {up(value):.1f}H{right}"/>')
    ends = [points(rows, f'{metric}_{end}', x, join) for end in ('low', 'high')]
    if len(at) and all(len(place) == len(at) for place, _ in ends):
        edge = np.concatenate([ends[0][1], ends[1][1][::-1]])
        path = _path(across(np.concatenate([at, at[::-1]])), up(edge))
        parts.append(f'<path class="band" d="{path}Z"/>')
    parts += [_line(css, across(place), up(height)) for css, (place, height) in curves.items()]
    marks = ' '.join(
        f'{px:.1f},{py:.1f},{short(a)},{short(v)}'
        for px, py, a, v in zip(across(at), up(values), at, values, strict=True)
    )
    label = escape(f'{metric}: {short(values[-1])}' if len(values) else metric)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-points="{marks}" data-box="{TOP},{bottom},{left:.1f},{right}">{"".join(parts)}</svg>'
    )


def limits(values: np.ndarray, log: bool) -> tuple[float, float]:
    """Return the range of an axis, also for values below FLAT, where y_range returns a constant."""
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 1.2, high * 1.2
    pad = PAD * (high - low) if high - low > FLAT * abs(high) else 0.1 * abs(high) or 0.1
    return low - pad, high + pad


def spark(rows: Rows, metric: str) -> Markup:
    """Draw a line without axes."""
    join = joined(Panel('', metric, {'': [rows]}, {}), 'step', 40)
    at, values = points(rows, metric, 'step', join)
    if values.size < 2 or at[-1] <= at[0]:
        return Markup()
    width, height = SPARK
    xs = 1 + (at - at[0]) / (at[-1] - at[0]) * (width - 2)
    ys = height - 2 - (values - values.min()) / (np.ptp(values) or 1.0) * (height - 4)
    box = f'viewBox="0 0 {width} {height}" aria-hidden="true"'
    return Markup(f'<svg class="spark" {box}>{_line("own", xs, ys)}</svg>')


def _path(xs: Iterable[float], ys: Iterable[float]) -> str:
    return 'M' + 'L'.join(f'{x:.1f} {y:.1f}' for x, y in zip(xs, ys, strict=True))


def _line(css: str, xs: np.ndarray, ys: np.ndarray) -> str:
    if len(xs) == 1:
        return f'<circle class="{css}" cx="{xs[0]:.1f}" cy="{ys[0]:.1f}" r="2.5"/>'
    return f'<path class="line {css}" d="{_path(xs, ys)}"/>' if len(xs) else ''
