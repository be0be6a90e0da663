import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_jax.measure.stats import (
    equivalent,
    holm,
    improvement_interval,
    iqm,
    mean,
    mean_se,
    paired_difference,
    paired_p,
    probability_of_improvement,
    stratified_bootstrap,
    wilson_interval,
)


def test_wilson_interval_by_hand():
    # p = 0.5, n = 10, z = 1.959964: z^2 = 3.841459. Centre (0.5 + 0.192073) / 1.384146 = 0.5;
    # margin 1.959964 sqrt(0.025 + 0.009604) / 1.384146 = 0.263406.
    np.testing.assert_allclose(wilson_interval(5, 10), (0.236594, 0.763406), atol=1e-5)
    # Wilson intervals known from textbooks: 81 of 263 gives 0.2553 to 0.3662 (Newcombe 1998).
    np.testing.assert_allclose(wilson_interval(81, 263), (0.2553, 0.3662), atol=5e-5)
    # Newcombe 1998, table I, method 3: 15 of 148 and 1 of 29.
    np.testing.assert_allclose(wilson_interval(15, 148), (0.0624, 0.1605), atol=5e-5)
    np.testing.assert_allclose(wilson_interval(1, 29), (0.0061, 0.1718), atol=5e-5)
    # 0 of n: the upper end is z^2 / (n + z^2).
    np.testing.assert_allclose(wilson_interval(0, 20), (0, 3.841459 / 23.841459), atol=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_rate_and_mirrors(case):
    successes, n = case
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    np.testing.assert_allclose(wilson_interval(n - successes, n), (1 - high, 1 - low), atol=1e-12)


def test_wilson_interval_refuses_impossible_counts():
    with pytest.raises(ValueError, match='successes=3'):
        wilson_interval(3, 2)


def test_mean_and_standard_error_by_hand():
    # (1, 2, 6): mean 3, variance (4 + 1 + 9) / 2 = 7, error sqrt(7 / 3).
    np.testing.assert_allclose(mean_se(np.array([1, 2, 6])), (3, np.sqrt(7 / 3)))
    assert mean_se(np.array([2.0]))[0] == 2 and np.isnan(mean_se(np.array([2.0]))[1])


def test_iqm_by_hand():
    # Eight values: two dropped at either end, (3 + 4 + 5 + 6) / 4. Five: one at either end.
    assert iqm(np.array([8, 1, 7, 2, 3, 4, 5, 6])) == 4.5
    assert iqm(np.array([100, 1, 2, 3, -100])) == 2
    assert iqm(np.array([1, 2, 6])) == 3


def test_iqm_equals_the_trimmed_mean_of_scipy():
    trim_mean = pytest.importorskip('scipy.stats').trim_mean
    rng = np.random.default_rng(0)
    for n in range(1, 30):
        x = rng.normal(size=(3, n))
        np.testing.assert_allclose(iqm(x), trim_mean(x, 0.25, axis=1))


def test_bootstrap_of_equal_runs_is_a_point_and_is_repeatable():
    assert stratified_bootstrap([np.full(5, 0.25)]) == (0.25, 0.25)
    runs = [np.random.default_rng(0).normal(size=10)]
    assert stratified_bootstrap(runs) == stratified_bootstrap(runs)
    assert stratified_bootstrap(runs) != stratified_bootstrap(runs, seed=1)


@pytest.mark.parametrize('runs, coverage', [(3, 0.76), (5, 0.90), (10, 0.93)])
def test_the_share_of_bootstrap_intervals_that_hold_the_truth_is_as_tables_say(runs, coverage):
    """Normal runs around 0, so that the IQM's true value is 0; error of 500 cases: 0.01 to 0.02."""
    cases = np.random.default_rng(1).normal(size=(500, runs))
    ends = np.array([stratified_bootstrap([x], resamples=500, seed=i) for i, x in enumerate(cases)])
    assert abs(np.mean((ends[:, 0] <= 0) & (ends[:, 1] >= 0)) - coverage) < 0.04


def test_strata_are_never_mixed():
    # Runs redrawn across tasks would mix the 0s and 1s; within them the mean is always 0.5.
    assert stratified_bootstrap([np.zeros(3), np.ones(3)], mean) == (0.5, 0.5)


def test_bootstrap_needs_runs():
    with pytest.raises(ValueError, match='at least one run'):
        stratified_bootstrap([np.array([])])


def test_probability_of_improvement_by_hand():
    # Pairs (1,1) tie, (1,0) win, (3,1) win, (3,0) win: 3.5 / 4. Second task: always worse.
    ours, theirs = [np.array([1, 3]), np.array([0])], [np.array([1, 0]), np.array([2, 3])]
    assert probability_of_improvement(ours[:1], theirs[:1]) == 0.875
    assert probability_of_improvement(ours, theirs) == 0.4375
    assert probability_of_improvement(theirs, ours) == 1 - 0.4375
    with pytest.raises(ValueError, match='2 and 1 tasks'):
        probability_of_improvement(ours, theirs[:1])


def test_probability_of_improvement_is_mann_whitney_s_u():
    u = pytest.importorskip('scipy.stats').mannwhitneyu
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, 7), rng.integers(0, 6, 5)  # with ties
    expected = u(x, y).statistic / (7 * 5)
    np.testing.assert_allclose(probability_of_improvement([x], [y]), expected)


def test_the_interval_of_an_improvement():
    # Every run of ours is better, whatever is redrawn; of one run each there is nothing to redraw.
    assert improvement_interval([np.array([4, 5, 6])], [np.array([1, 2])]) == (1.0, 1.0)
    assert improvement_interval([np.array([1])], [np.array([1])]) == (0.5, 0.5)
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=40), rng.normal(size=30)
    low, high = improvement_interval([ours], [theirs])
    p = probability_of_improvement([ours], [theirs])
    # Of equal distributions U / nm has variance (n + m + 1) / 12nm: s.d. 0.0702 for 40 and 30.
    np.testing.assert_allclose((p - low, high - p), 1.96 * 0.0702, rtol=0.15)
    assert (low, high) == improvement_interval([ours], [theirs])
    with pytest.raises(ValueError, match='at least one run in each task'):
        improvement_interval([ours], [np.array([])])


def test_a_paired_difference_is_students():
    ours, theirs = np.array([3.0, 5.0, 8.0]), np.array([2.0, 3.0, 2.0])  # gaps 1, 2, 6
    mean, low, high = paired_difference(ours, theirs)
    # s.d. sqrt(7), over sqrt(3); two-sided 5 % point of t with 2 degrees of freedom: 4.3027
    np.testing.assert_allclose((mean, mean - low, high - mean), (3, 6.5724, 6.5724), rtol=1e-4)
    expected = pytest.importorskip('scipy.stats').ttest_rel(ours, theirs).confidence_interval()
    np.testing.assert_allclose((low, high), expected)
    assert np.isnan(paired_difference(ours[:1], theirs[:1])[1:]).all()


def test_paired_p_by_hand():
    # Differences 1, 2, 3: mean 2, error 1 / sqrt 3, t = 2 sqrt 3 with 2 degrees of freedom:
    # P(|T| > t) = 1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14).
    assert paired_p([2, 4, 6], [1, 2, 3]) == pytest.approx(1 - np.sqrt(12 / 14))
    assert paired_p([1, 2, 3], [2, 4, 6]) == pytest.approx(1 - np.sqrt(12 / 14))
    assert paired_p([1, 2], [1, 2]) == 1 and paired_difference([1, 2], [1, 2]) == (0, 0, 0)
    assert np.isnan(paired_p([1], [2]))
    # Arms of one value each measure nothing: two dead ones were the same with p 1
    for value in (0.0, 0.1, 1.0):
        dead = np.full(5, value)
        assert np.isnan(paired_p(dead, dead)) and not equivalent(dead, dead, 0.05)
        assert np.isnan(paired_difference(dead, dead)[1:]).all()
    # Two equal gaps, as of success in 128ths, are no proof, whatever their rounding
    ours, theirs = [0.6 + 1 / 128, 0.7 + 1 / 128], [0.6, 0.7]
    assert np.isnan(paired_p(ours, theirs)) and not equivalent(ours, theirs, 0.05)
    assert np.isnan(paired_difference(ours, theirs)[1:]).all()


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=9))
def test_paired_p_is_below_a_twentieth_where_the_interval_leaves_out_0(pairs):
    ours, theirs = np.array(pairs).T
    _, low, high = paired_difference(ours, theirs)
    if low != high:
        assert (paired_p(ours, theirs) < 0.05) == (low > 0 or high < 0)


def test_holm_by_hand():
    # Of four .01 x 4, .02 x 3, .03 x 2 = .06 and .04 x 1, which is no less than the one before.
    np.testing.assert_allclose(holm([0.03, 0.01, 0.04, 0.02]), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_array_equal(holm([0.6, np.nan, 0.3]), [0.6, np.nan, 0.6])  # two tests
    np.testing.assert_array_equal(holm([0.7, 0.8]), [1, 1])
    assert holm([]).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_the_p_and_bonferronis(p):
    adjusted, bonferroni = holm(p), np.minimum(len(p) * np.array(p), 1)
    assert (adjusted >= p).all() and (adjusted <= bonferroni).all()
    assert (np.diff(adjusted[np.argsort(p)]) >= 0).all()


def test_equivalence_by_hand():
    # Differences -1, 0, 1: mean 0, error 1 / sqrt 3; t of 2 degrees at 95 % is 2.919986: +- 1.68586
    assert equivalent([0, 0, 0], [1, 0, -1], 1.686) and not equivalent([0, 0, 0], [1, 0, -1], 1.685)
    # Shifted by 1: the upper end is at 2.68586
    assert equivalent([1, 1, 1], [1, 0, -1], 2.686) and not equivalent([1, 1, 1], [1, 0, -1], 2.685)
    assert not equivalent([0], [0], 1)  # of one pair there is no interval
