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
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 22  # margins of the axes; longer labels take more
CHARACTER, LETTERS = 6.2, 10  # width and height of text
LARGER = 1.7  # text of a wide chart on a narrow screen, in live_page.html
MOST = 160  # points of a line
TICKS = 6  # on an axis, at most
CLEARANCE = 8  # between the name of a reference line and a curve
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
    runs, drawn first. wide: twice as wide; on narrow screens its text is larger. Metrics with
    `_low` and `_high` have a band.
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
    up = Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    size = LARGER if wide else 1.0  # of text in the style sheet
    left = max(LEFT, 8 + size * CHARACTER * max(map(len, labels(up.ticks()))))
    across = Axis(first, last, left, width - RIGHT)
    parts = _grid(across, up)
    for value in lines.values():
        parts.append(
            f'<path class="reference" d="M{left:.1f} {up.place(value):.1f}H{across.end}"/>'
        )
    curves = [(across.place(at), up.place(values))]
    for css, place, height in drawn:
        curves.append((across.place(place), up.place(height)))
        parts.append(_line(f'other {css}', *curves[-1]))
    bounds = [points(rows, f'{metric}_{end}', x, join) for end in ('low', 'high')]
    if len(at) and all(len(found[0]) == len(at) for found in bounds):
        (_, below), (_, above) = bounds
        curves += [(across.place(at), up.place(one)) for one in (below, above)]
        edge = _path(
            np.concatenate([across.place(at), across.place(at)[::-1]]),
            np.concatenate([up.place(above), up.place(below)[::-1]]),
        )
        parts.append(f'<path class="band" d="{edge}Z"/>')
    parts.append(_line('own', *curves[0]))
    parts += _names(lines, across, up, curves)
    marks = ' '.join(
        f'{px:.1f},{py:.1f},{short(a)},{short(v)}'
        for px, py, a, v in zip(across.place(at), up.place(values), at, values, strict=True)
    )
    label = f'{metric}: {short(values[-1])}' if len(values) else metric
    return (
        f'<svg class="chart" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape_attribute(label)}" data-points="{escape_attribute(marks)}" '
        f'data-box="{TOP},{HEIGHT - BOTTOM},{left:.1f},{width - RIGHT}">{"".join(parts)}</svg>'
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
        parts.append(f'<path class="grid" d="M{across.begin:.1f} {y:.1f}H{across.end}"/>')
        parts.append(f'<text class="y" x="{across.begin - 5:.1f}" y="{y + 3.5:.1f}">{label}</text>')
    for value, label in zip(across.ticks(), labels(across.ticks()), strict=True):
        limit = across.end + RIGHT - CHARACTER * len(label) / 2  # of a label inside the drawing
        x = min(across.place(value), limit)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 6}">{label}</text>')
    return parts


def _names(
    lines: Mapping[str, float],
    across: Axis,
    up: Axis,
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> list[str]:
    """Draw the name of each reference line at the free end and side of the line.

    A name is left out if it would cover another one.
    """
    parts: list[str] = []
    places: list[tuple[str, float]] = []
    for name, value in sorted(lines.items(), key=lambda line: line[1]):
        text, best = f'{name} {short(value)}', (-1.0, '', 0.0)
        for css in ('name', 'name left'):
            length = CHARACTER * len(text)
            begin = across.begin + 3 if css == 'name left' else across.end - length
            xs = np.linspace(begin, begin + length, 9)
            for y in (up.place(value) - 3, up.place(value) + LETTERS):
                inside = LETTERS <= y <= HEIGHT - BOTTOM
                free = all(css != side or abs(y - at) > LETTERS for side, at in places)
                space = min(_space(curve, xs, y - LETTERS / 3) for curve in curves)
                if inside and free and min(space, CLEARANCE) > best[0]:
                    best = (min(space, CLEARANCE), css, y)
        if best[1]:
            places.append(best[1:])
            x = across.begin + 3 if best[1] == 'name left' else across.end
            parts.append(
                f'<text class="{best[1]}" x="{x:.1f}" y="{best[2]:.1f}">{escape(text)}</text>'
            )
    return parts


def _space(curve: tuple[np.ndarray, np.ndarray], xs: np.ndarray, y: float) -> float:
    """Return the least distance between a curve and a height y over xs; inf without a curve."""
    at, heights = curve
    covered = xs[(xs >= at.min()) & (xs <= at.max())] if len(at) else at
    return float(np.abs(np.interp(covered, at, heights) - y).min()) if len(covered) else math.inf


def _path(xs: np.ndarray, ys: np.ndarray) -> str:
    return 'M' + 'L'.join(f'{x:.1f} {y:.1f}' for x, y in zip(xs, ys, strict=True))


def _line(css: str, xs: np.ndarray, ys: np.ndarray) -> str:
    if not len(xs):
        return ''
    if len(xs) == 1:
        return f'<circle class="{css}" cx="{xs[0]:.1f}" cy="{ys[0]:.1f}" r="2.5"/>'
    return f'<path class="line {css}" d="{_path(xs, ys)}"/>'
