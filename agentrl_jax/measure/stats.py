"""Statistics of a few runs: intervals, robust means and tests, on the host."""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import scipy  # loads scipy.stats, which takes a second, at its first use

QUANTILES = (0.5 - 0.95 / 2, 0.5 + 0.95 / 2)  # with 0.025 the last bits of tables differ
Samples = Sequence[np.ndarray]  # one array of runs per task


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a success rate from `successes` of n episodes (Wilson 1927).

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n); (0, 1) for n = 0.
    """
    if not 0 <= successes <= n:
        raise ValueError(f'successes={successes} must be between 0 and n={n}')
    return _wilson(successes / n, n) if n else (0.0, 1.0)


def _wilson(p: float, n: float) -> tuple[float, float]:
    """Return Wilson's interval for a share p and a number n > 0, which may be fractional."""
    z = statistics.NormalDist().inv_cdf(0.975)
    centre = p + z * z / (2 * n)
    margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # Exactly 0 or 1 if no episode or every episode succeeded, despite rounding.
    low = 0.0 if p == 0 else (centre - margin) / scale
    high = 1.0 if p == 1 else (centre + margin) / scale
    return low, high


def level_interval(shares: np.ndarray, most: float) -> tuple[float, float]:
    """95 % interval of the mean of shares [L]: levels are independent, their samples are not.

    Wilson's interval with Kish's effective sample size, the number of independent episodes with the
    same variance: n = p (1 - p) / (s^2 / L), s^2 = mean (p_l - p)^2. If all samples of a level
    agree, n = L and the result is wilson_interval. n is at most `most`, the number of samples.
    (0, 1) without levels.
    """
    shares = np.asarray(shares, np.float64)
    levels = shares.size
    if not levels:
        return 0.0, 1.0
    p, variance = float(shares.mean()), float(shares.var())
    if levels < 2 or np.isin(shares, (0.0, 1.0)).all():
        return _wilson(p, levels)
    n = levels * p * (1 - p) / variance if variance > 0 else math.inf
    return _wilson(p, min(n, most))


def pass_at(solved: np.ndarray, tries: np.ndarray, k: int) -> np.ndarray:
    """1 - C(n - c, k) / C(n, k) of each level of n >= k tries, c of them solved (arXiv:2107.03374).

    The unbiased estimate of the chance that one of k episodes of the level is solved; ints [L].
    """
    pairs = zip(np.asarray(solved).tolist(), np.asarray(tries).tolist(), strict=True)
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c, n in pairs if n >= k])


def iqm(x: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis, without int(n / 4) values at each end.

    The definition of Agarwal et al. 2021 (arXiv:2108.13264). For up to three values, the mean.
    """
    x = np.sort(np.asarray(x, np.float64), axis=-1)  # scipy's trimmed mean rounds differently
    cut = x.shape[-1] // 4
    return x[..., cut : x.shape[-1] - cut].mean(axis=-1)


def stratified_bootstrap(
    strata: Samples, *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of the IQM of all runs, redrawn within each stratum (task).

    The same arguments give the same interval.
    """

    def joined(draws: Samples) -> np.ndarray:
        return iqm(np.concatenate(draws, axis=1))

    return _bootstrap(strata, joined, resamples, seed)


def _bootstrap(
    samples: Samples, statistic: Callable[[Samples], np.ndarray], resamples: int, seed: int
) -> tuple[float, float]:
    """95 % interval of a statistic of redrawn samples; scipy rejects samples of one run."""
    if not samples or any(np.size(runs) == 0 for runs in samples):
        raise ValueError('a bootstrap needs at least one run in each sample')
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(runs, np.float64) for runs in samples]
    draws = [x[rng.integers(0, x.size, (resamples, x.size))] for x in arrays]
    low, high = np.quantile(statistic(draws), QUANTILES)
    return float(low), float(high)


def probability_of_improvement(ours: Samples, theirs: Samples) -> float:
    """P(a run of ours beats a run of theirs), ties half, mean over tasks (arXiv:2108.13264).

    For one task it is Mann and Whitney's U divided by the number of pairs.
    """
    tasks = zip(ours, theirs, strict=True)
    return float(np.mean([_wins(np.asarray(x), np.asarray(y)) for x, y in tasks]))


def improvement_interval(
    ours: Samples, theirs: Samples, *, resamples: int = 2000
) -> tuple[float, float]:
    """95 % interval of probability_of_improvement, runs of both redrawn within each task."""

    def improvement(draws: Samples) -> np.ndarray:
        return np.mean([_wins(*pair) for pair in zip(draws[::2], draws[1::2], strict=True)], axis=0)

    samples = [runs for pair in zip(ours, theirs, strict=True) for runs in pair]
    return _bootstrap(samples, improvement, resamples, seed=0)


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Share of pairs in which x is larger, ties half: x [..., n], y [..., m] -> [...]."""
    larger = (x[..., :, None] > y[..., None, :]).mean((-2, -1))
    return larger + 0.5 * (x[..., :, None] == y[..., None, :]).mean((-2, -1))


def paired_difference(
    ours: np.ndarray, theirs: np.ndarray, confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return (mean, low, high) of ours - theirs per pair; Student's interval, nan for one pair.

    For runs with the same seeds: their levels and noise are shared and cancel. The interval of
    equal gaps is also nan, because they show no noise, unless the runs are equal (_repeats).
    """
    gaps = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    centre = float(gaps.mean())
    if _repeats(ours, theirs):
        return centre, centre, centre
    if _are_equal(gaps):
        return centre, math.nan, math.nan
    low, high = scipy.stats.ttest_1samp(gaps, 0).confidence_interval(confidence)
    return centre, float(low), float(high)


def paired_p(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Two-sided p of Student's paired test that ours - theirs has mean 0.

    nan for one pair, and for equal gaps unless the runs are equal.
    """
    gaps = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    if _repeats(ours, theirs):
        return 1.0
    return math.nan if _are_equal(gaps) else float(scipy.stats.ttest_1samp(gaps, 0).pvalue)


def _repeats(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether each run equals its partner and the seeds differ.

    If all runs have the same value, such as 0, the metric is at a floor and cannot differ.
    """
    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return x.size > 1 and bool((x == y).all()) and not _are_equal(x)


def _are_equal(gaps: np.ndarray) -> bool:
    """Whether numbers are equal up to rounding."""
    return bool(np.ptp(gaps) <= 1e-12 * np.abs(gaps).max())


def equivalent(ours: np.ndarray, theirs: np.ndarray, margin: float) -> bool:
    """Whether two one-sided paired tests at 5 % show |mean of ours - theirs| < margin.

    True if the 90 % interval is inside the margin (Schuirmann 1987); False for one pair.
    """
    _, low, high = paired_difference(ours, theirs, confidence=0.9)
    return -margin < low and high < margin


def holm(p: Sequence[float]) -> np.ndarray:
    """Return p values adjusted for multiple tests, in the same order; nan: no test (Holm 1979).

    The k-th smallest of m becomes max over j <= k of (m - j + 1) p_j, at most 1.
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)  # nan last
    factors = np.count_nonzero(~np.isnan(values)) - np.arange(values.size)
    adjusted = np.full(values.size, math.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * values[order]), 1)
    return adjusted
