import json
import re

import numpy as np
import pytest

from agentrl_jax.records.plots import learning_curves, summarise
from agentrl_jax.records.run_log import RunLog


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
    # The mean of two redrawn runs is one of them or their mean: the interval spans both.
    np.testing.assert_allclose(curve.low, [0, 0.2, 0.4])
    np.testing.assert_allclose(curve.high, [0.2, 0.4, 0.6])


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


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='at least one metric and one run'):
        learning_curves({}, tmp_path / 'c')
