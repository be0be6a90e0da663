import numpy as np

from agentrl_jax.records import plots
from agentrl_jax.records.series import Panel, joined, points, summarise, y_range


def rows_of(values, first=0, every=1):
    return [{'step': first + every * i, 'eval/success': v} for i, v in enumerate(values)]


def test_the_summary_is_the_mean_over_seeds_where_all_have_values():
    runs = [rows_of([0.0, 0.2, 0.4]), rows_of([0.2, 0.4, 0.6, 0.8]), []]
    curve = summarise(runs, 'eval/success', 'step')
    assert len(curve.seeds) == 2
    np.testing.assert_allclose(curve.x, [0, 1, 2])  # only one seed has step 3
    np.testing.assert_allclose(curve.centre, [0.1, 0.3, 0.5])
    assert curve.low is None and curve.high is None  # two seeds have no interval


def test_the_interval_of_five_seeds_by_hand():
    """Four seeds at 0 and one at 1; redrawn, k of five are 1, k binomial(5, 0.2).

    The IQM drops one at either end: it is (k - 1)/3, within 0 and 1.
    """
    curve = summarise([rows_of([0.0])] * 4 + [rows_of([1.0])], 'eval/success', 'step')
    np.testing.assert_allclose(curve.centre, [0.0])
    # P(k = 0) = 0.33 > 2.5 %; P(k <= 2) = 0.942, P(k <= 3) = 0.993: the 97.5 % quantile is 2/3.
    np.testing.assert_allclose((curve.low, curve.high), ([0.0], [2 / 3]))


def test_one_seed_shows_the_wilson_interval_that_it_logged():
    row = {'step': 0, 'eval/success': 0.5, 'eval/success_low': 0.4, 'eval/success_high': 0.6}
    curve = summarise([[row]], 'eval/success', 'step')
    assert (curve.low, curve.high) == (0.4, 0.6)
    assert summarise([rows_of([0.5])], 'eval/success', 'step').low is None
    assert summarise([[], rows_of([np.nan])], 'eval/success', 'step') is None


def test_neighbouring_values_are_joined_by_hand():
    rows = [{'step': i, 'x': x} for i, x in enumerate([1, 3, np.nan, 5, 9, 4])]
    x, y = points(rows, 'x', 'step', 2)  # (0, 1), (3, 4), (5) of the finite ones
    np.testing.assert_allclose(x, [0.5, 3.5, 5])
    np.testing.assert_allclose(y, [2, 7, 4])
    assert points([], 'x', 'step', 2)[0].size == 0
    panel = Panel('', 'x', {'a': [rows], 'b': [[]]}, {})
    assert [joined(panel, 'step', limit) for limit in (2, 3, 5, 100)] == [3, 2, 1, 1]


def of_values(*values):
    return [{'step': i, 'x': x} for i, x in enumerate(values)]


def test_the_range_of_a_metric_holds_seeds_and_references():
    runs = {'a': [[{'step': 0, 'x': 2.0}, {'step': 1, 'x': 4.0}]]}
    panel = Panel('', 'x', runs, {'line': 12.0}, {'a': [[{'step': 0, 'x': -8.0}]]})
    np.testing.assert_allclose(y_range([panel]), (-8.8, 12.8))  # 4 % of 20 at either end
    assert y_range([Panel('', 'eval/success', {}, {})]) == (-0.02, 1.04)


def test_panels_without_a_value_are_left_out_and_files_have_the_same_bytes(tmp_path):
    panels = [
        Panel('a', 'eval/success', {f'{i}': [rows_of([0.1, 0.5])] for i in range(5)}, {'o': 0.5}),
        Panel('b', 'x', {f'{i}': [of_values(0.2, 40, 0.3, 0.3)] for i in range(2)}, {}),
        Panel('c', 'x', {'a': [rows_of([np.nan])]}, {}),
    ]
    first, second = (plots.draw(panels, tmp_path / s, x='step', columns=2) for s in 'ab')
    assert [path.suffix for path in first] == ['.png', '.svg']
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in second]
    assert plots.draw(panels[2:], tmp_path / 'c', x='step', columns=2) == ()
