import json
import re

import numpy as np
import pytest
from PIL import Image

from agentrl_jax.records import report
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


def test_the_legend_counts_seeds_and_shows_missing_runs(tmp_path):
    runs = {'ours': [rows_of([0.1, 0.2]), rows_of([0.3, 0.4]), []], 'gone': [[], []]}
    _, svg = learning_curves(
        runs,
        tmp_path / 'curves',
        references={'eval/success': {'random': 0.19, 'oracle': 0.89}},
        title='A title',
    )
    labels = labels_of(svg)
    for expected in (
        'ours (n = 2 of 3)',
        'gone (n = 0 of 2)',
        'random 0.19',
        'oracle 0.89',
        'A title',
        'step',
    ):
        assert expected in labels, labels


def test_reference_lines_stay_inside_the_panel(tmp_path):
    # The oracle lies far above the curve: the axis must reach it.
    _, svg = learning_curves(
        {'ours': [rows_of([0.1, 0.2])]}, tmp_path / 'c', references={'eval/success': {'o': 0.9}}
    )
    assert '0.8' in labels_of(svg)


def sizes_of(svg):
    """Number of pairs of axes in an SVG."""
    return len(re.findall(r'<g id="axes_\d+">', svg.read_text()))


def drawn(folder, *metrics, seeds=1, labels=1, steps=3, **values):
    """(texts, pairs of axes) of curves of runs whose metrics are all `values`, else 0.5."""
    row = {name: values.get(name, 0.5) for name in metrics}
    rows = [{'step': step, **row} for step in range(steps)]
    runs = {f'label {i}': [rows] * seeds for i in range(labels)}
    _, svg = learning_curves(runs, folder / 'c', metrics=metrics)
    return labels_of(svg), sizes_of(svg)


def test_steps_are_whole_numbers(tmp_path):
    """Runs of few steps had ticks at 0.25 and 2.5."""
    for steps in (1, 2, 4, 6):
        texts, _ = drawn(tmp_path, 'x', x=0.123, steps=steps)
        ticks = texts[: texts.index('step')]
        assert ticks and all(re.fullmatch(r'\d+', tick) for tick in ticks), ticks
        assert len(set(ticks)) == len(ticks)


def test_a_run_without_a_label_has_no_legend(tmp_path):
    _, svg = learning_curves({'': [rows_of([0.1, 0.2])]}, tmp_path / 'c', title='A title')
    assert 'A title' in labels_of(svg) and not any('n = ' in text for text in labels_of(svg))


def test_a_panel_without_a_value_is_left_out(tmp_path):
    texts, panels = drawn(tmp_path, 'eval/success', 'group/return_std', **{'eval/success': np.nan})
    assert panels == 1 and 'eval/success' not in texts and 'group/return_std' in texts
    with pytest.raises(ValueError, match='no run measured any of eval/success'):
        drawn(tmp_path, 'eval/success', **{'eval/success': np.nan})


@pytest.mark.parametrize('value', [0.0, 3e-9, -2.5, 1234.5])
def test_a_value_that_does_not_vary_has_an_axis_that_says_what_it_is(tmp_path, value):
    """Rounding at 1e-9 filled a panel, with ticks of 1e-8 and an offset in its corner."""
    noisy = [{'step': i, 'x': value + 1e-12 * (-1) ** i} for i in range(4)]
    low, high = y_range([Panel('', 'x', {'a': [noisy]}, {})])
    assert low < value < high and high - low >= 0.1 * max(1.0, abs(value))
    _, svg = learning_curves({'a': [noisy]}, tmp_path / 'c', metrics=['x'])
    assert not any('e' in text or '+' in text for text in labels_of(svg) if text[-1].isdigit())


def bands_of(svg):
    return svg.read_text().count('<g id="FillBetweenPolyCollection')


@pytest.mark.parametrize('seeds, bands', [(2, 0), (4, 0), (5, 1), (6, 1)])
def test_fewer_than_five_seeds_have_no_band(tmp_path, seeds, bands):
    """With 3 seeds a 95 % bootstrap interval holds the truth in 76 % of cases."""
    runs = {'ours': [rows_of([0.1 * seed, 0.2 + 0.1 * seed]) for seed in range(seeds)]}
    _, svg = learning_curves(runs, tmp_path / 'c')
    assert bands_of(svg) == bands
    assert any('bootstrap' in text for text in labels_of(svg)) == bool(bands)


def test_many_labels_are_small_multiples(tmp_path):
    """Eight labels with their seeds in one panel could not be told apart."""
    texts, panels = drawn(tmp_path, 'eval/success', labels=3)
    assert panels == 1 and 'label 2 (n = 1)' in texts and 'grey: the others' not in texts
    texts, panels = drawn(tmp_path, 'eval/success', labels=7)
    assert panels == 7 and {f'label {i} (n = 1)' for i in range(7)} <= set(texts)
    assert any('grey: the others' in text for text in texts)
    texts, panels = drawn(tmp_path, 'eval/success', 'policy/entropy', labels=5, seeds=2)
    assert panels == 10 and {'eval/success', 'policy/entropy'} <= set(texts)
    assert texts.count('label 4') == 1 and '(n = 2)' in texts  # beside its panels, in two lines


def test_small_multiples_of_a_column_have_one_range_and_their_own_references(tmp_path):
    runs = {f'{i} actions': [rows_of([0.1 * i, 0.2 * i])] for i in range(1, 6)}
    references = {f'{i} actions: random play': 0.05 * i for i in range(1, 6)} | {'oracle': 1.0}
    _, svg = learning_curves(runs, tmp_path / 'c', references={'eval/success': references})
    texts = labels_of(svg)
    after = [texts[i + 1] for i, text in enumerate(texts) if text == 'random play']  # a second line
    assert after == [f'{0.05 * i:.3g}' for i in range(1, 6)]
    assert texts.count('oracle 1') == 5


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


def test_the_words_below_a_figure_are_in_lines_that_it_has_room_for():
    """Figures of two columns cut both ends of the explanation off."""
    parts = ['thin: seeds', 'thick: interquartile mean', 'grey: the others']
    assert _fold(parts, 20) == '   '.join(parts)
    narrow = _fold(parts, 3).splitlines()
    assert narrow == ['thin: seeds', 'thick: interquartile mean', 'grey: the others']
    assert _fold(parts, 0.5).splitlines() == narrow  # a part is never broken


def test_neighbouring_values_are_joined_by_hand():
    rows = [{'step': i, 'x': x} for i, x in enumerate([1, 3, np.nan, 5, 9, 4])]
    x, y = points(rows, 'x', 'step', 2)  # (0, 1), (3, 4), (5) of the finite ones
    np.testing.assert_allclose(x, [0.5, 3.5, 5])
    np.testing.assert_allclose(y, [2, 7, 4])
    assert points([], 'x', 'step', 2)[0].size == 0
    panel = Panel('', 'x', {'a': [rows], 'b': [[]]}, {})
    assert [joined(panel, 'step', most) for most in (2, 3, 5, 100)] == [3, 2, 1, 1]


def test_long_runs_are_drawn_by_means_and_say_so(tmp_path):
    """Noise of single steps hid the curves, and a figure of 24 panels had a megabyte."""
    texts, _ = drawn(tmp_path, 'x', steps=100)
    assert not any('logged values' in text for text in texts)
    texts, _ = drawn(tmp_path, 'x', steps=101)
    assert any('means of up to 2 logged values' in text for text in texts)
    texts, _ = drawn(tmp_path, 'x', steps=101, labels=4)
    assert any('means of up to 4 logged values' in text for text in texts)


def test_spikes_of_a_positive_metric_have_a_log_axis(tmp_path):
    def rows(*values):
        return [{'step': i, 'x': x} for i, x in enumerate(values)]

    spikes = Panel('', 'x', {'a': [rows(0.2, 0.4, 0.3, 40)]}, {})
    assert spiky(spikes)
    assert not spiky(spikes._replace(runs={'a': [rows(0.2, 0.4, 0.3, 3)]}))
    assert not spiky(spikes._replace(runs={'a': [rows(0, 0.4, 0.3, 40)]}))  # zero has no logarithm
    assert not spiky(Panel('', 'x', {}, {}))
    _, svg = learning_curves(spikes.runs, tmp_path / 'c', metrics=['x'])
    assert {'1', '10'} <= set(labels_of(svg)) and '20' not in labels_of(svg)


def test_a_png_has_a_palette_in_which_every_curve_keeps_its_colour(tmp_path):
    runs = {f'{i}': [rows_of([0.1, 0.2 + 0.1 * i])] for i in range(len(COLOURS))}
    png, _ = learning_curves(runs, tmp_path / 'c')
    with Image.open(png) as image:
        assert image.mode == 'P' and len(image.getcolors()) <= PNG_COLOURS
        pixels = np.unique(np.asarray(image.convert('RGB')).reshape(-1, 3), axis=0).astype(int)
    for colour in COLOURS:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(pixels - wanted).max(1).min() <= 8, colour


def test_small_multiples_of_a_column_have_one_range_of_x(tmp_path):
    """Each row had its own, and only the lowest said which."""
    runs = {f'{i}': [rows_of([0.1, 0.2], every=10 ** (i + 1))] for i in range(4)}
    _, svg = learning_curves(runs, tmp_path / 'c')
    panels = svg.read_text().split('<g id="axes_')[1:]
    assert len(panels) == 4
    ticks = [re.findall(r'<!-- (\d+) -->', panel) for panel in panels]  # of y are not whole
    assert ticks[0] == ticks[1] == ticks[2] == ticks[3] and '10000' in ticks[0]


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='at least one metric and one run'):
        learning_curves({}, tmp_path / 'c')


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
