import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from agentrl_jax.measure import stats


@pytest.mark.parametrize(
    'successes, n, interval',
    [
        # p = 0.5, z^2 = 3.841459: centre 0.5, margin z sqrt(0.025 + 0.009604) / 1.384146
        (5, 10, (0.236594, 0.763406)),
        (81, 263, (0.2553, 0.3662)),  # Newcombe 1998, table I, method 3
        (15, 148, (0.0624, 0.1605)),
        (1, 29, (0.0061, 0.1718)),
        (0, 20, (0, 3.841459 / 23.841459)),  # z^2 / (n + z^2)
        (0, 0, (0, 1)),
    ],
)
def test_wilson_interval_by_hand(successes, n, interval):
    result = stats.wilson_interval(successes, n)
    np.testing.assert_allclose(result, interval, atol=5e-5)
    mirrored = stats.wilson_interval(n - successes, n)
    np.testing.assert_allclose(mirrored, (1 - result[1], 1 - result[0]), atol=1e-12)
    with pytest.raises(ValueError, match='successes'):
        stats.wilson_interval(n + 1, n)


def test_iqm_by_hand():
    # Eight values: two dropped at either end, (3 + 4 + 5 + 6) / 4. Five: one at either end.
    assert stats.iqm(np.array([8, 1, 7, 2, 3, 4, 5, 6])) == 4.5
    assert stats.iqm(np.array([100, 1, 2, 3, -100])) == 2
    assert stats.iqm(np.array([1, 2, 6])) == 3


def test_bootstrap_by_hand():
    assert stats.stratified_bootstrap([np.full(5, 0.25)]) == (0.25, 0.25)
    runs = [np.random.default_rng(0).normal(size=10)]
    assert stats.stratified_bootstrap(runs) != stats.stratified_bootstrap(runs, seed=1)
    # Runs redrawn across tasks would mix the 0s and 1s; within them the IQM is always 0.5.
    assert stats.stratified_bootstrap([np.zeros(3), np.ones(3)]) == (0.5, 0.5)
    with pytest.raises(ValueError):
        stats.stratified_bootstrap([np.array([])])


@pytest.mark.parametrize('runs, coverage', [(3, 0.76), (5, 0.90), (10, 0.93)])
def test_bootstrap_coverage_matches_the_tables(runs, coverage):
    """Normal runs around 0, so that the IQM's true value is 0; error of 500 cases: 0.01 to 0.02."""
    cases = np.random.default_rng(1).normal(size=(500, runs))
    low, high = np.array(
        [stats.stratified_bootstrap([x], resamples=500, seed=i) for i, x in enumerate(cases)]
    ).T
    assert abs(np.mean((low <= 0) & (high >= 0)) - coverage) < 0.04


def test_probability_of_improvement_by_hand():
    # Pairs (1,1) tie, (1,0) win, (3,1) win, (3,0) win: 3.5 / 4. Second task: always worse.
    ours, theirs = [np.array([1, 3]), np.array([0])], [np.array([1, 0]), np.array([2, 3])]
    assert stats.probability_of_improvement(ours[:1], theirs[:1]) == 0.875
    assert stats.probability_of_improvement(ours, theirs) == 0.4375
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, 7), rng.integers(0, 6, 5)  # with ties
    expected = mannwhitneyu(x, y).statistic / (7 * 5)
    np.testing.assert_allclose(stats.probability_of_improvement([x], [y]), expected)


def test_the_interval_of_an_improvement():
    # Every run of ours is better in any draw; one run each cannot be redrawn.
    better = [np.array([4, 5, 6])], [np.array([1, 2])]
    assert stats.improvement_interval(*better) == (1.0, 1.0)
    assert stats.improvement_interval([np.array([1])], [np.array([1])]) == (0.5, 0.5)
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(size=40), rng.normal(size=30)
    low, high = stats.improvement_interval([ours], [theirs])
    p = stats.probability_of_improvement([ours], [theirs])
    # For equal distributions U / nm has variance (n + m + 1) / 12nm: s.d. 0.0702 for 40 and 30.
    np.testing.assert_allclose((p - low, high - p), 1.96 * 0.0702, rtol=0.15)


def test_paired_statistics_by_hand():
    # Gaps 1, 2, 3: mean 2, error 1 / sqrt 3, t = 2 sqrt 3 with 2 degrees of freedom:
    # P(|T| > t) = 1 - t / sqrt(2 + t^2); the two-sided 5 % point of t is 4.302653
    assert stats.paired_p([2, 4, 6], [1, 2, 3]) == pytest.approx(1 - np.sqrt(12 / 14))
    margin = 4.302653 / np.sqrt(3)
    difference = stats.paired_difference([2, 4, 6], [1, 2, 3])
    np.testing.assert_allclose(difference, (2, 2 - margin, 2 + margin), rtol=1e-6)
    assert stats.paired_p([1, 2], [1, 2]) == 1
    assert stats.paired_difference([1, 2], [1, 2]) == (0, 0, 0)
    # Gaps -1, 0, 1: t of 2 degrees at 95 % is 2.919986, so the 90 % interval is +- 1.68586
    assert stats.equivalent([0, 0, 0], [1, 0, -1], 1.686)
    assert not stats.equivalent([0, 0, 0], [1, 0, -1], 1.685)


@pytest.mark.parametrize(
    'ours, theirs',
    [
        ([1], [2]),  # one pair
        ([0.1] * 5, [0.1] * 5),  # all runs have one value
        ([0.6 + 1 / 128, 0.7 + 1 / 128], [0.6, 0.7]),  # equal gaps up to rounding
    ],
)
def test_pairs_without_noise_are_not_tested(ours, theirs):
    assert np.isnan(stats.paired_p(ours, theirs)) and not stats.equivalent(ours, theirs, 0.05)
    assert np.isnan(stats.paired_difference(ours, theirs)[1:]).all()


def test_holm_by_hand():
    # Four values: .01 x 4, .02 x 3, .03 x 2 = .06 and .04 x 1, raised to the .06 before it.
    np.testing.assert_allclose(stats.holm([0.03, 0.01, 0.04, 0.02]), [0.06, 0.04, 0.06, 0.06])
    np.testing.assert_array_equal(stats.holm([0.6, np.nan, 0.3]), [0.6, np.nan, 0.6])
    np.testing.assert_array_equal(stats.holm([0.7, 0.8]), [1, 1])
    assert stats.holm([]).size == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_the_p_and_bonferronis(p):
    adjusted, bonferroni = stats.holm(p), np.minimum(len(p) * np.array(p), 1)
    assert (adjusted >= p).all() and (adjusted <= bonferroni).all()
    assert (np.diff(adjusted[np.argsort(p)]) >= 0).all()
