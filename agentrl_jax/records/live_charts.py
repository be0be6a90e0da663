"""Small charts as SVG, drawn by the server of a live page: colours are those of its style sheet."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentrl_jax.records.markup import escape, escape_attribute
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

WIDTH, HEIGHT = 340, 180  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22  # of the axes
MOST = 160  # points of a line
TICKS = 6  # on an axis, at most
LABEL_APART = 12  # of the names of reference lines, in units of the drawing
SPARK = (110, 20)  # size of a line without axes
PREFIXES = {9: 'G', 6: 'M', 3: 'k'}


class Axis(NamedTuple):
    """From values to places."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: np.ndarray | float) -> np.ndarray | float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), np.log10(value)
        share = (value - low) / (high - low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max(1, -(-(last - first) // (TICKS - 1)))
            return [10.0**k for k in range(first, last + 1, step)] or [self.low, self.high]
        raw = (self.high - self.low) / (TICKS - 1)
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * k for k in (1, 2, 5, 10) if size * k >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * k for k in range(first, last + 1)]


def short(value: float, digits: int = 3) -> str:
    """'0.25', '12k', '1.5G', '3e-05'; digits: significant ones."""
    if not math.isfinite(value):
        return str(value)
    for power, letter in PREFIXES.items():
        if abs(value) >= 10**power * (10 if power == 3 else 1):
            return f'{value / 10**power:.{digits}g}{letter}'
    return f'{value:.{max(digits, 4)}g}' if abs(value) >= 1000 else f'{value:.{digits}g}'


def labels(values: Sequence[float]) -> list[str]:
    """The values in as few digits as tell them apart."""
    for digits in range(3, 9):
        found = [short(value, digits) for value in values]
        if len(set(found)) == len(found):
            break
    return found


def chart(
    rows: Rows,
    metric: str,
    *,
    x: str = 'step',
    references: Mapping[str, float] | None = None,
    others: Sequence[tuple[str, Rows]] = (),
    wide: bool = False,
) -> str:
    """One metric over x as <svg>; '' where it was not measured.

    references: name -> value of a line across. others: (class of the style sheet, rows) of further
    runs, drawn first. Metrics with `_low` and `_high` beside them have a band.
    """
    lines = references or {}
    own = Panel('', metric, {'': [rows]}, lines)
    every = Panel('', metric, {'': [rows], **{css: [more] for css, more in others}}, lines)
    join = joined(every, x, MOST)
    at, values = points(rows, metric, x, join)
    drawn = [(css, *points(more, metric, x, join)) for css, more in others]
    xs = np.concatenate([at, *(place for _, place, _ in drawn)])
    if not xs.size:
        return ''
    width = 2 * WIDTH if wide else WIDTH
    log = spiky(own, x, join) and not others and not lines
    if metric.endswith(SHARES):
        low, high = y_range([every], x, join)
    else:
        heights = np.concatenate([values, *(y for _, _, y in drawn), [*lines.values()]])
        low, high = limits(heights, log)
    first, last = float(xs.min()), float(xs.max())
    last = last if last > first else first + 1
    across = Axis(first, last, LEFT, width - RIGHT)
    up = Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    parts = [*_grid(across, up), *_references(lines, across, up)]
    for css, place, height in drawn:
        parts.append(_line(f'other {css}', across.place(place), up.place(height)))
    bounds = [points(rows, f'{metric}_{end}', x, join) for end in ('low', 'high')]
    if len(at) and all(len(found[0]) == len(at) for found in bounds):
        (_, below), (_, above) = bounds
        edge = _path(
            np.concatenate([across.place(at), across.place(at)[::-1]]),
            np.concatenate([up.place(above), up.place(below)[::-1]]),
        )
        parts.append(f'<path class="band" d="{edge}Z"/>')
    parts.append(_line('own', across.place(at), up.place(values)))
    marks = ' '.join(
        f'{px:.1f},{py:.1f},{short(a)},{short(v)}'
        for px, py, a, v in zip(across.place(at), up.place(values), at, values, strict=True)
    )
    label = f'{metric}: {short(values[-1])}' if len(values) else metric
    return (
        f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape_attribute(label)}" data-points="{escape_attribute(marks)}" '
        f'data-box="{TOP},{HEIGHT - BOTTOM},{LEFT},{width - RIGHT}">{"".join(parts)}</svg>'
    )


def limits(values: np.ndarray, log: bool) -> tuple[float, float]:
    """An axis that holds the values, however small they are: y_range takes 1e-6 for constant."""
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 1.2, high * 1.2
    pad = PAD * (high - low) if high - low > FLAT * abs(high) else 0.1 * abs(high) or 0.1
    return low - pad, high + pad


def spark(rows: Rows, metric: str) -> str:
    """A line without axes."""
    panel = Panel('', metric, {'': [rows]}, {})
    at, values = points(rows, metric, 'step', joined(panel, 'step', 40))
    if values.size < 2 or at[-1] <= at[0]:
        return ''
    low, high = float(values.min()), float(values.max())
    spread = high - low if high > low else 1.0
    width, height = SPARK
    line = _line(
        'own',
        1 + (at - at[0]) / (at[-1] - at[0]) * (width - 2),
        height - 2 - (values - low) / spread * (height - 4),
    )
    return f'<svg class="spark" viewBox="0 0 {width} {height}" aria-hidden="true">{line}</svg>'


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for value, label in zip(up.ticks(), labels(up.ticks()), strict=True):
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{across.end}"/>')
        parts.append(f'<text class="y" x="{LEFT - 5}" y="{y + 3.5:.1f}">{label}</text>')
    for value, label in zip(across.ticks(), labels(across.ticks()), strict=True):
        text = f'<text class="x" x="{across.place(value):.1f}" y="{HEIGHT - 6}">'
        parts.append(f'{text}{label}</text>')
    return parts


def _references(lines: Mapping[str, float], across: Axis, up: Axis) -> list[str]:
    """Lines across with their names above them; a name that would cover another one is left out."""
    parts, named = [], math.inf
    for name, value in sorted(lines.items(), key=lambda line: line[1]):
        y = up.place(value)
        parts.append(f'<path class="reference" d="M{LEFT} {y:.1f}H{across.end}"/>')
        if named - y >= LABEL_APART:
            named = y
            low = y + 10 if y < TOP + LABEL_APART else y - 3
            parts.append(
                f'<text class="name" x="{across.end}" y="{low:.1f}">{escape(name)} '
                f'{short(value)}</text>'
            )
    return parts


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
    return 'M' + 'L'.join(f'{x:.1f} {y:.1f}' for x, y in zip(xs, ys, strict=True))


def _line(css: str, xs: np.ndarray, ys: np.ndarray) -> str:
    if not len(xs):
        return ''
    if len(xs) == 1:
        return f'<circle class="{css}" cx="{xs[0]:.1f}" cy="{ys[0]:.1f}" r="2.5"/>'
    return f'<path class="line {css}" d="{_path(xs, ys)}"/>'
