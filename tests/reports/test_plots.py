import json
import re

import numpy as np
import pytest
from golden_text import assert_golden
from PIL import Image

from agentrl_jax.records import plots, report
from agentrl_jax.records.plots import COLOURS, PNG_COLOURS, _fold, learning_curves
from agentrl_jax.records.run_log import RunLog
from agentrl_jax.records.series import Panel, joined, points, spiky, summarise, y_range


def rows_of(values, first=0, every=1):
    return [{'step': first + every * i, 'eval/success': v} for i, v in enumerate(values)]


def labels_of(svg):
    """Texts of an SVG whose glyphs are paths: matplotlib leaves them as comments."""
    return re.findall(r'<!-- (.*?) -->', svg.read_text())


def test_the_summary_is_the_mean_over_seeds_where_all_have_values():
    runs = [rows_of([0.0, 0.2, 0.4]), rows_of([0.2, 0.4, 0.6, 0.8]), []]
    curve = summarise(runs, 'eval/success', 'step', 'mean')
    assert len(curve.seeds) == 2
    np.testing.assert_allclose(curve.x, [0, 1, 2])  # step 3 is known of one seed only
    np.testing.assert_allclose(curve.centre, [0.1, 0.3, 0.5])
    assert curve.low is None and curve.high is None  # of two seeds there is no interval


def test_the_interval_of_five_seeds_by_hand():
    """Four seeds at 0 and one at 1: the mean of five redrawn ones is k/5, k binomial(5, 0.2)."""
    curve = summarise([rows_of([0.0])] * 4 + [rows_of([1.0])], 'eval/success', 'step', 'mean')
    np.testing.assert_allclose(curve.centre, [0.2])
    # P(k = 0) = 0.33 > 2.5 %; P(k <= 2) = 0.942, P(k <= 3) = 0.993: the 97.5 % quantile is 3/5.
    np.testing.assert_allclose((curve.low, curve.high), ([0.0], [0.6]))


def test_seeds_logged_at_other_steps_are_joined_by_straight_lines():
    runs = [rows_of([0.0, 1.0], every=10), rows_of([0.0, 0.5, 1.0], every=5)]
    curve = summarise(runs, 'eval/success', 'step', 'iqm')
    np.testing.assert_allclose(curve.x, [0, 5, 10])
    np.testing.assert_allclose(curve.centre, [0, 0.5, 1])


def test_one_seed_shows_the_wilson_interval_that_it_logged():
    row = {'step': 0, 'eval/success': 0.5, 'eval/success_low': 0.4, 'eval/success_high': 0.6}
    curve = summarise([[row]], 'eval/success', 'step', 'iqm')
    assert (curve.low, curve.high) == (0.4, 0.6)
    assert summarise([rows_of([0.5])], 'eval/success', 'step', 'iqm').low is None
    assert summarise([[], rows_of([np.nan])], 'eval/success', 'step', 'iqm') is None


def test_files_and_rows_give_the_same_bytes_every_time(tmp_path):
    values = [[0.1, 0.5, 0.7], [0.2, 0.4, 0.9]]
    for seed, numbers in enumerate(values):
        with RunLog(tmp_path / str(seed)) as log:
            for step, value in enumerate(numbers):
                log.write(step, {'eval/success': value, 'group/return_std': 1 - value})
    files = {'ours': [tmp_path / str(seed) / 'metrics.jsonl' for seed in range(2)]}
    parsed = {'ours': [[json.loads(line) for line in p.open()] for p in files['ours']]}
    written = []
    for stem, runs in (('a', files), ('b', files), ('c', parsed)):
        images = learning_curves(
            runs, tmp_path / 'out' / stem, metrics=['eval/success', 'group/return_std']
        )
        written.append([path.read_bytes() for path in images])
    assert written[0] == written[1] == written[2]
    png, svg = written[0]
    assert png.startswith(b'\x89PNG') and b'<svg' in svg
    assert not re.search(rb'20\d\d-\d\d-\d\d|matplotlib v', svg)
    names = sorted(path.name for path in (tmp_path / 'out').iterdir())
    assert names == [f'{stem}.{ending}' for stem in 'abc' for ending in ('png', 'svg')]


def test_names_of_references_stand_beside_the_panel_where_no_curve_is(tmp_path):
    """They lay on the curves."""
    _, svg = learning_curves(
        {'ours': [rows_of([0.1, 0.5])]}, tmp_path / 'c', references={'eval/success': {'o': 0.5}}
    )
    text = svg.read_text()
    panel = text[text.index('id="patch_2"') :]
    right = max(float(x) for x in re.findall(r'[ML] ([\d.]+)', panel[: panel.index('/>')]))
    (name,) = re.findall(r'<!-- o 0.5 -->\s*<g [^>]*translate\(([\d.]+)', text)
    assert float(name) > right


def test_neighbouring_values_are_joined_by_hand():
    rows = [{'step': i, 'x': x} for i, x in enumerate([1, 3, np.nan, 5, 9, 4])]
    x, y = points(rows, 'x', 'step', 2)  # (0, 1), (3, 4), (5) of the finite ones
    np.testing.assert_allclose(x, [0.5, 3.5, 5])
    np.testing.assert_allclose(y, [2, 7, 4])
    assert points([], 'x', 'step', 2)[0].size == 0
    panel = Panel('', 'x', {'a': [rows], 'b': [[]]}, {})
    assert [joined(panel, 'step', most) for most in (2, 3, 5, 100)] == [3, 2, 1, 1]


def test_a_png_has_a_palette_in_which_every_curve_keeps_its_colour(tmp_path):
    runs = {f'{i}': [rows_of([0.1, 0.2 + 0.1 * i])] for i in range(len(COLOURS))}
    png, _ = learning_curves(runs, tmp_path / 'c')
    with Image.open(png) as image:
        assert image.mode == 'P' and len(image.getcolors()) <= PNG_COLOURS
        pixels = np.unique(np.asarray(image.convert('RGB')).reshape(-1, 3), axis=0).astype(int)
    for colour in COLOURS:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(pixels - wanted).max(1).min() <= 8, colour


def labelled(labels, *metrics, steps=3, seeds=1, value=0.5):
    """(runs of equal seeds, the metrics they have)."""
    rows = [{'step': step, **dict.fromkeys(metrics, value)} for step in range(steps)]
    return {f'label {i}': [rows] * seeds for i in range(labels)}, {'metrics': metrics}


def of_values(*values):
    return [{'step': i, 'x': x} for i, x in enumerate(values)]


BANDS = {n: {'ours': [rows_of([0.1 * k, 0.2 + 0.1 * k]) for k in range(n)]} for n in (4, 5)}
ACTIONS = {f'{i} actions': [rows_of([0.1 * i, 0.2 * i])] for i in range(1, 6)}
OWN_LINES = {f'{i} actions: random play': 0.05 * i for i in range(1, 6)} | {'oracle': 1.0}
NAN = [rows_of([np.nan]) + of_values(0.5, 0.5)]
FIGURES = {  # what it shows -> (runs, keywords)
    'missing runs, references beyond the curve and a title': (
        {'ours': [rows_of([0.1, 0.2]), rows_of([0.3, 0.4]), []], 'gone': [[], []]},
        {'references': {'eval/success': {'random': 0.19, 'oracle': 0.89}}, 'title': 'A title'},
    ),
    'a run without a label, so without a legend': ({'': [rows_of([0.1, 0.2])]}, {'title': 'A'}),
    'a panel without a value is left out': ({'a': NAN}, {'metrics': ['eval/success', 'x']}),
    'four seeds without a band': (BANDS[4], {}),
    'five seeds with one': (BANDS[5], {}),
    'three labels together': labelled(3, 'eval/success'),
    'seven labels as small multiples': labelled(7, 'eval/success'),
    'five labels of two metrics': labelled(5, 'eval/success', 'policy/entropy', seeds=2),
    'references of rows': (ACTIONS, {'references': {'eval/success': OWN_LINES}}),
    'one range of steps for a column': (
        {f'{i}': [rows_of([0.1, 0.2], every=10 ** (i + 1))] for i in range(4)},
        {},
    ),
    '100 steps as they are': labelled(1, 'x', steps=100),
    '101 steps as means of two': labelled(1, 'x', steps=101),
    '101 steps of four labels': labelled(4, 'x', steps=101),
    'spikes on a logarithmic axis': ({'a': [of_values(0.2, 0.4, 0.3, 40)]}, {'metrics': ['x']}),
    **{  # ticks are whole
        f'{steps} steps': labelled(1, 'x', steps=steps, value=0.123) for steps in (1, 2, 4, 6)
    },
    **{  # an axis of 1e-8 with an offset in its corner
        f'{x} with noise': (
            {'a': [of_values(*[x + d for d in (1e-12, -1e-12)] * 2)]},
            {'metrics': ['x']},
        )
        for x in (0.0, 3e-9, -2.5, 1234.5)
    },
}


def test_the_words_of_figures_are_the_golden_ones(tmp_path, monkeypatch):
    """Texts in the order of their places, so ticks, legends and references of every panel."""
    monkeypatch.setitem(plots.draw.__kwdefaults__, 'endings', ('svg',))  # half of the time
    parts = {}
    for title, (runs, keywords) in FIGURES.items():
        (svg,) = learning_curves(runs, tmp_path / 'c', **keywords)
        panels = len(re.findall(r'<g id="axes_\d+">', svg.read_text()))
        bands = svg.read_text().count('<g id="FillBetweenPolyCollection')
        words = '\n'.join(labels_of(svg))
        parts[title] = f'{panels} panels, {bands} bands\n{words}'
    assert_golden('plots.txt', parts)


def test_a_constant_has_an_axis_around_it_and_a_spike_of_a_positive_metric_a_logarithm():
    for value in (0.0, 3e-9, -2.5, 1234.5):
        noisy = of_values(*[value + 1e-12 * (-1) ** i for i in range(4)])
        low, high = y_range([Panel('', 'x', {'a': [noisy]}, {})])
        assert low < value < high and high - low >= 0.1 * max(1.0, abs(value))
    for values, logarithmic in (
        ((0.2, 0.4, 0.3, 40), True),
        ((0.2, 0.4, 0.3, 3), False),
        ((0, 0.4, 0.3, 40), False),  # zero has no logarithm
        ((), False),
    ):
        assert spiky(Panel('', 'x', {'a': [of_values(*values)]}, {})) == logarithmic


def test_the_range_of_a_metric_holds_seeds_and_references():
    runs = {'a': [[{'step': 0, 'x': 2.0}, {'step': 1, 'x': 4.0}]]}
    panel = Panel('', 'x', runs, {'line': 12.0}, {'a': [[{'step': 0, 'x': -8.0}]]})
    np.testing.assert_allclose(y_range([panel]), (-8.8, 12.8))  # 4 % of 20 at either end
    assert y_range([Panel('', 'eval/success', {}, {})]) == (-0.02, 1.04)


def test_the_words_below_a_figure_are_in_lines_that_it_has_room_for():
    """Figures of two columns cut both ends of the explanation off."""
    parts = ['thin: seeds', 'thick: interquartile mean', 'grey: the others']
    assert _fold(parts, 20) == '   '.join(parts)
    assert _fold(parts, 3).splitlines() == parts == _fold(parts, 0.5).splitlines()


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='at least one metric and one run'):
        learning_curves({}, tmp_path / 'c')
    with pytest.raises(ValueError, match='no run measured any of eval/success'):
        learning_curves({'a': [rows_of([np.nan])]}, tmp_path / 'c')


# ---- curves of a run that lives ----------------------------------------------------------------


def living(folder, steps):
    rows = [{'step': step, 'time_s': 1.0, 'eval/success': 0.5} for step in range(steps)]
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (folder / 'reference.json').write_text('{"random": 0.25}')
    return report.Curves(folder, None, clock=lambda: living.now)


def test_curves_are_drawn_while_a_run_lives_and_take_a_small_share_of_its_time(
    tmp_path, monkeypatch
):
    """There was none before the end, and none after Ctrl-C."""
    living.now, drawn = 0.0, []

    def draw(workdir, title):
        drawn.append(living.now)
        living.now += 1.5

    monkeypatch.setattr(report, 'write_curves', draw)
    monkeypatch.setattr(report.about, 'title', lambda config: 'T')
    curves = living(tmp_path, 2)
    while living.now < 1000:
        curves.draw_if_due()
        living.now += 0.5
    assert drawn[0] == report.FIRST_S and 10 <= len(drawn) <= 14
    assert 1.5 * len(drawn) / living.now <= report.SHARE
    curves.draw()  # at the end, whatever is due
    assert drawn[-1] >= 1000
    monkeypatch.setattr(report.jax, 'process_index', lambda: 1)
    curves.draw()
    assert len(drawn) <= 15


def test_curves_of_a_run_that_measured_nothing_are_not_drawn(tmp_path, monkeypatch):
    living(tmp_path, 0)
    assert report.write_curves(tmp_path, 'T') is None
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "time_s": 1, "eval/success": "nan"}\n')
    assert report.write_curves(tmp_path, 'T') is None and not list(tmp_path.glob('curves*'))
    (tmp_path / 'metrics.jsonl').unlink()
    monkeypatch.setattr(report.about, 'title', lambda config: pytest.fail('nothing to draw'))
    report.Curves(tmp_path, None).draw()
    living(tmp_path, 3)
    assert report.write_curves(tmp_path, 'T') == tmp_path / 'curves.png'
