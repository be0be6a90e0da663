"""Learning curves as PNG and SVG: thin seeds, their mean with an interval, reference lines.

Up to MAX_TOGETHER labels share a panel. With more, each label gets its own panel, with the means
of all other labels in grey (small multiples). Panels without data are left out.
"""

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FormatStrFormatter, MaxNLocator, NullFormatter
from PIL import Image

from agentrl_jax.machine import files
from agentrl_jax.records.series import (
    Curve,
    Panel,
    all_runs,
    joined,
    points,
    spiky,
    summarise,
    y_range,
)

# Okabe and Ito's colours, which colour-blind readers can distinguish; grey is for references.
# Further labels repeat the colours with another dash.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
DASHES = ('-', (0, (4, 1.2)), (0, (1, 1)))
REFERENCE_COLOUR = '#555555'
REFERENCE_STYLES = ('--', ':', '-.')
OTHERS_COLOUR = '#c4c4c4'  # means of other labels in small multiples
MAX_TOGETHER = 3  # labels in one panel
MULTIPLE_COLUMNS = (4, 3)  # of small multiples; the choice that leaves fewer cells empty is used
MIN_LINE_GAP = {
    8: 0.06,
    7: 0.2,
}  # font size -> minimum distance of names, as a share of the y range
LETTER = 0.078  # inches; width of a letter at font size 9
ENDINGS = ('png', 'svg')
DPI = 150
Draw = Callable[..., tuple[Path, ...]]  # (path without ending, endings=...) -> files written
PNG_COLOURS = 256  # a palette of these looks the same and takes a third of the bytes
STYLE = {
    'svg.hashsalt': 'agentrl_jax',  # otherwise ids and therefore the bytes are random
    'font.family': 'DejaVu Sans',  # included in matplotlib
    'font.size': 10,
    'axes.titlesize': 11,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': '#e6e6e6',
    'legend.frameon': False,
    'legend.fontsize': 9,
}
# The default method favours colours with many pixels and would change the colours of thin lines.
PALETTE = {'method': Image.Quantize.MAXCOVERAGE, 'dither': Image.Dither.NONE}
AXIS_LABELS = {'time_s': 'seconds', 'tokens': 'tokens sampled'}


class Look(NamedTuple):
    """Settings of all panels of a figure."""

    x: str
    most: int  # maximum points per line
    limits: Mapping[str, tuple[float, float]]  # y range of a metric; default: from the data
    width: float  # of the thick lines
    size: int  # font size of the references' names
    letters: int  # maximum letters per line of these names


def draw(
    panels: Sequence[Panel],
    stem: str | os.PathLike,
    *,
    x: str,
    columns: int,
    title: str = '',
    limits: Mapping[str, tuple[float, float]] | None = None,
    endings: Sequence[str] = ENDINGS,
) -> tuple[Path, ...]:
    """Draw panels row by row into files stem.<ending>; () if nothing was measured.

    columns: number of columns, unless small multiples are used; limits: y range of a metric. The
    same input gives the same bytes.
    """
    panels = [
        panel
        for panel in panels
        if any(points(rows, panel.metric, x)[0].size for rows in all_runs(panel))
    ]
    if not panels:
        return ()
    # A Figure without pyplot: no global state, no display, Agg for the PNG.
    with matplotlib.rc_context(STYLE):
        figure = Figure(layout='constrained')
        if max(len(panel.runs) for panel in panels) > MAX_TOGETHER:
            look = Look(x, 30, limits or {}, width=1.5, size=7, letters=11)
            _draw_multiples(figure, panels, look)
        else:
            look = Look(x, 100, limits or {}, width=2, size=8, letters=40)
            _draw_together(figure, panels, look, columns)
        if title:
            figure.suptitle(title)
        return save(figure, Path(stem), endings)


def _draw_together(figure: Figure, panels: Sequence[Panel], look: Look, columns: int) -> None:
    """Draw all labels of a panel in one pair of axes; one legend for all panels."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure.set_size_inches((6.4, 4.4) if len(panels) == 1 else (4.2 * columns, 3.1 * lines + 0.5))
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    drawn = []
    for axis, panel in zip(axes, panels, strict=False):
        join = joined(panel, look.x, look.most)
        drawn.append(_draw_panel(axis, panel, _curves(panel, look), look, join))
        axis.set_title(panel.title)
        axis.set_xlabel(AXIS_LABELS.get(look.x, look.x))
        axis.set_ylabel(panel.y_label)
        _finish(axis, panel, panel.references, look)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    shades = set().union(*(kinds for kinds, _ in drawn))
    handles, texts = _legend(axes[: len(panels)], drawn)
    wide = figure.get_figwidth()
    fitting = int(wide / (0.6 + LETTER * max(map(len, texts), default=0)))
    figure.legend(
        handles,
        texts,
        loc='outside lower center',
        ncols=max(1, min(3, fitting)),
        title=_fold(_explain(look, shades, panels), wide),
        title_fontsize=9,
    )


def _draw_multiples(figure: Figure, panels: Sequence[Panel], look: Look) -> None:
    """Draw one row per label and one column per panel; for a single panel, a grid of labels."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.runs))
    alone = len(panels) == 1
    wide = len(panels)
    if alone:
        wide = min(MULTIPLE_COLUMNS, key=lambda columns: -len(labels) % columns)
    high = -(-len(labels) // wide) if alone else len(labels)
    names = 0.6 * any(panel.references for panel in panels)
    figure.set_size_inches((2.5 + names) * wide + 0.4, 1.55 * high + 0.7)
    axes = figure.subplots(high, wide, squeeze=False, sharex='all' if alone else 'col')
    for unused in axes.flatten()[len(labels) * len(panels) :]:
        unused.set_visible(False)
    shades, curves = set(), [_curves(panel, look) for panel in panels]
    for k, axis in enumerate(axes.flatten()[: len(labels) * len(panels)]):
        i, j = divmod(k, len(panels))
        panel, label = panels[j], labels[i]
        kinds, count = _draw_among(axis, panel, curves[j], label, i, look)
        shades |= kinds
        _finish(axis, panel, _references_of(panel, label, labels), look)
        axis.tick_params(labelsize=8, labelbottom=alone or i == high - 1)
        if alone:
            axis.set_title(f'{label} (n = {count})', fontsize=9)
        elif i == 0:
            axis.set_title(f'{panel.title}: {panel.y_label}'.strip(': '), fontsize=9)
        if not alone and j == 0:
            axis.set_ylabel(f'{textwrap.fill(label, 18)}\n(n = {count})', fontsize=8)
    parts = [*_explain(look, shades, panels), 'grey: the others']
    below = f'{AXIS_LABELS.get(look.x, look.x)}\n{_fold(parts, figure.get_figwidth())}'
    figure.supxlabel(below, fontsize=9)
    if alone:
        figure.supylabel(panels[0].y_label or panels[0].title, fontsize=9)


def _draw_among(
    axis: Axes, panel: Panel, curves: Mapping[str, Curve | None], label: str, index: int, look: Look
) -> tuple[set[str], str]:
    """Draw one label over the grey means of all others; return (intervals, number of seeds)."""
    for other, curve in curves.items():
        if curve and other != label:
            axis.plot(curve.x, curve.centre, color=OTHERS_COLOUR, linewidth=0.8, zorder=1)
    if label not in panel.runs:
        return set(), '0'
    partial = {label: panel.unfinished[label]} if label in panel.unfinished else {}
    alone = panel._replace(runs={label: panel.runs[label]}, unfinished=partial)
    join = joined(panel, look.x, look.most)
    shades, counts = _draw_panel(axis, alone, curves, look, join, first=index)
    return shades, counts[label]


def _references_of(panel: Panel, label: str, labels: Sequence[str]) -> dict[str, float]:
    """References shared by all rows, and this row's references without its name."""
    of_others = tuple(f'{other}: ' for other in labels if other != label)
    return {
        name.removeprefix(f'{label}: '): value
        for name, value in panel.references.items()
        if not name.startswith(of_others)
    }


def _curves(panel: Panel, look: Look) -> dict[str, Curve | None]:
    join = joined(panel, look.x, look.most)
    return {
        label: summarise(seeds, panel.metric, look.x, join=join, most=look.most)
        for label, seeds in panel.runs.items()
    }


def _draw_panel(
    axis: Axes,
    panel: Panel,
    curves: Mapping[str, Curve | None],
    look: Look,
    join: int,
    first: int = 0,
) -> tuple[set[str], dict[str, str]]:
    """Draw all labels; return their kinds of intervals and the number of seeds of each.

    first: index of the first label's colour.
    """
    shades, counts = set(), {}
    for index, (label, seeds) in enumerate(panel.runs.items(), first):
        curve = curves[label]
        partial = panel.unfinished[label] if label in panel.unfinished else ()
        finished, planned = len(curve.seeds) if curve else 0, len(seeds) + len(partial)
        counts[label] = f'{finished}' if finished == planned else f'{finished} of {planned}'
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        thin = {'color': colour, 'linewidth': 0.7}
        for rows in partial:
            axis.plot(*points(rows, panel.metric, look.x, join), linestyle=':', **thin)
        if not curve:  # missing runs appear in the legend
            axis.plot([], [], color=colour, linestyle=dash, label=label)
            continue
        if finished > 1:
            for seed in curve.seeds:
                axis.plot(*seed, alpha=0.45, linestyle=dash, **thin)
        if curve.low is not None:
            shades.add('bootstrap' if finished > 1 else 'Wilson')
            axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
        axis.plot(
            curve.x,
            curve.centre,
            color=colour,
            linewidth=look.width,
            marker='o' if curve.x.size == 1 else None,
            linestyle=dash,
            label=label,
            zorder=3,
        )
    return shades, counts


def _finish(axis: Axes, panel: Panel, references: Mapping[str, float], look: Look) -> None:
    """Set ranges and ticks, and draw the reference lines of a panel."""
    join = joined(panel, look.x, look.most)
    if panel.metric in look.limits:
        axis.set_ylim(*look.limits[panel.metric])
    elif spiky(panel, look.x, join):
        axis.set_yscale('log')
        axis.yaxis.set_major_formatter(FormatStrFormatter('%g'))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(*y_range([panel], look.x, join))
    if axis.get_yscale() == 'linear':
        axis.ticklabel_format(axis='y', useOffset=False)
    if look.x == 'tokens':
        axis.xaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 5, 10)))
        axis.xaxis.set_major_formatter(EngFormatter(sep=' '))
    elif look.x == 'step':
        locator = MaxNLocator('auto', steps=(1, 2, 5, 10), integer=True, min_n_ticks=1)
        axis.xaxis.set_major_locator(locator)
    _draw_references(axis, references, look)


def _legend(axes: Sequence[Axes], drawn: Sequence[tuple[set[str], dict[str, str]]]) -> tuple:
    """(lines, texts) of all labels, with each panel's number of seeds if they differ."""
    lines, counts = {}, {}
    for axis, (_, numbers) in zip(axes, drawn, strict=True):
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
            counts.setdefault(label, []).append(numbers[label])
    texts = [
        f'{label} (n = {numbers[0] if len(set(numbers)) == 1 else " | ".join(numbers)})'
        for label, numbers in counts.items()
    ]
    return list(lines.values()), texts


def _draw_references(axis: Axes, references: Mapping[str, float], look: Look) -> None:
    """Draw reference lines with names to the right of the panel, clear of the curves.

    A line that is too close to the named line below it gets no name.
    """
    low, high = axis.get_ylim()
    gap, named = MIN_LINE_GAP[look.size] * (high - low), -float('inf')
    for index, (name, value) in enumerate(sorted(references.items(), key=lambda line: line[1])):
        style = REFERENCE_STYLES[index % len(REFERENCE_STYLES)]
        axis.axhline(value, color=REFERENCE_COLOUR, linewidth=1, linestyle=style)
        if value - named < gap:
            continue
        named = value
        axis.annotate(
            textwrap.fill(f'{name} {value:.3g}', look.letters),
            (1, value),  # fractions of the axes across, data upwards
            xycoords=axis.get_yaxis_transform(),
            xytext=(3, 0),
            textcoords='offset points',
            va='center',
            fontsize=look.size,
            color=REFERENCE_COLOUR,
        )


def _explain(look: Look, shades: set[str], panels: Sequence[Panel]) -> list[str]:
    """Explain the lines and shades in a figure."""
    seeds = max(len(runs) for panel in panels for runs in panel.runs.values())
    parts = ['thin: seeds', 'thick: interquartile mean'] if seeds > 1 else []
    if shades == {'bootstrap', 'Wilson'}:
        parts.append('shade: 95 % bootstrap interval, of one seed Wilson')
    elif shades:
        of_what = ' of the validation' if shades == {'Wilson'} else ''
        parts.append(f'shade: 95 % {min(shades)} interval{of_what}')
    if any(runs for panel in panels for runs in panel.unfinished.values()):
        parts.append('dotted: unfinished or refused, in no summary')
    join = max(joined(panel, look.x, look.most) for panel in panels)
    if join > 1:
        parts.append(f'means of up to {join} logged values')
    return parts


def _fold(parts: Sequence[str], inches: float) -> str:
    """Wrap the parts into lines that fit the width of a figure."""
    text = '   '.join(part.replace(' ', '\xa0') for part in parts)
    lines = textwrap.wrap(text, int(inches / LETTER), break_long_words=False)
    return '\n'.join(lines).replace('\xa0', ' ')


def save(figure: Figure, stem: Path, endings: Sequence[str]) -> tuple[Path, ...]:
    """Write the files atomically: no partial file is left."""
    written = []
    for ending in endings:
        path = stem.with_name(f'{stem.name}.{ending}')
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the date and the version of matplotlib, equal figures have equal bytes.
        nothing = {'Date': None, 'Creator': None} if ending == 'svg' else {'Software': None}
        with files.replacing(path) as partial:
            figure.savefig(partial, format=ending, dpi=DPI, metadata=nothing)
            if ending == 'png':
                with Image.open(partial) as image:
                    small = image.convert('RGB').quantize(PNG_COLOURS, **PALETTE)
                small.save(partial, 'png', optimize=True, dpi=(DPI, DPI))
        written.append(path)
    return tuple(written)
