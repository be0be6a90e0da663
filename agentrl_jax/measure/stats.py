"""Statistics of a few runs: intervals and robust means (NumPy, on the host)."""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import stdtr, stdtrit


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a success rate from `successes` of n episodes (Wilson 1927).

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n); (0, 1) for n = 0.
    """
    if not 0 <= successes <= n:
        raise ValueError(f'successes={successes} must lie between 0 and n={n}')
    return _wilson(successes / n, n, confidence) if n else (0.0, 1.0)


def _wilson(p: float, n: float, confidence: float) -> tuple[float, float]:
    """The same of a share p and a number n > 0 that need not be whole."""
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = p + z * z / (2 * n)
    margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # Exactly 0 and 1 where no episode or every episode succeeded, whatever rounding says.
    low = 0.0 if p == 0 else (centre - margin) / scale
    high = 1.0 if p == 1 else (centre + margin) / scale
    return low, high


def level_interval(
    shares: np.ndarray, most: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of the mean of the shares [L] of levels: levels are independent, their samples not.

    Wilson's with the number of episodes that would vary as much if they were independent (Kish's
    effective sample size): n = p (1 - p) / (s^2 / L), s^2 = mean (p_l - p)^2. It is L where all
    samples of a level agree, so that for shares of 0 and 1 it is wilson_interval; at most `most`,
    the number of samples. (0, 1) without levels.
    """
    shares = np.asarray(shares, np.float64)
    levels = shares.size
    if not levels:
        return 0.0, 1.0
    p, variance = float(shares.mean()), float(shares.var())
    binary = np.isin(shares, (0.0, 1.0)).all()
    if levels < 2 or binary:
        return _wilson(p, levels, confidence)
    n = levels * p * (1 - p) / variance if variance > 0 else math.inf
    return _wilson(p, min(n, most), confidence)


def pass_at(solved: np.ndarray, tries: np.ndarray, k: int) -> np.ndarray:
    """1 - C(n - c, k) / C(n, k) of each level of n >= k tries, c of them solved (arXiv:2107.03374).

    The unbiased estimate of the chance that one of k episodes of the level is solved; ints [L].
    """
    pairs = zip(np.asarray(solved).tolist(), np.asarray(tries).tolist(), strict=True)
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for c, n in pairs if n >= k])


def mean_se(x: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error (unbiased variance); the error of one value is nan."""
    x = np.asarray(x, np.float64)
    if x.size == 0:
        raise ValueError('mean_se needs at least one value')
    error = float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan
    return float(x.mean()), error


def mean(x: np.ndarray) -> np.ndarray:
    """Mean over the last axis."""
    return np.mean(x, axis=-1)


def iqm(x: np.ndarray) -> np.ndarray:
    """Interquartile mean over the last axis: int(n / 4) values dropped at either end.

    The definition of Agarwal et al. 2021 (arXiv:2108.13264); up to three values it is the mean.
    """
    x = np.sort(np.asarray(x, np.float64), axis=-1)
    cut = x.shape[-1] // 4
    return x[..., cut : x.shape[-1] - cut].mean(axis=-1)


def stratified_bootstrap(
    strata: Sequence[np.ndarray],
    statistic: Callable[[np.ndarray], np.ndarray] = iqm,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of statistic(all runs), runs redrawn within each stratum (task).

    `statistic` reduces the last axis. The same arguments give the same interval.
    """
    if not strata or any(np.size(runs) == 0 for runs in strata):
        raise ValueError('stratified_bootstrap needs at least one run in each stratum')
    rng = np.random.default_rng(seed)
    draws = [_redraw(runs, rng, resamples) for runs in strata]
    return _quantiles(statistic(np.concatenate(draws, axis=1)), confidence)


def _redraw(runs: np.ndarray, rng: np.random.Generator, times: int) -> np.ndarray:
    """float64 [times, n]: n runs drawn with replacement from n, again and again."""
    runs = np.asarray(runs, np.float64)
    return runs[rng.integers(0, runs.size, (times, runs.size))]


def _quantiles(values: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def probability_of_improvement(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """P(a run of ours beats a run of theirs), ties half, mean over tasks (arXiv:2108.13264).

    Of one task it is Mann and Whitney's U divided by the number of pairs.
    """
    _check_tasks(ours, theirs)
    tasks = zip(ours, theirs, strict=True)
    return float(np.mean([_wins(np.asarray(x), np.asarray(y)) for x, y in tasks]))


def improvement_interval(
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of probability_of_improvement, runs of both redrawn within each task."""
    _check_tasks(ours, theirs)
    rng = np.random.default_rng(seed)
    tasks = zip(ours, theirs, strict=True)
    draws = [(_redraw(x, rng, resamples), _redraw(y, rng, resamples)) for x, y in tasks]
    return _quantiles(np.mean([_wins(x, y) for x, y in draws], axis=0), confidence)


def paired_difference(
    ours: np.ndarray, theirs: np.ndarray, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(mean, low, high) of ours - theirs, run by run; Student's interval, nan for one pair.

    For runs that share a seed, and with it levels and noise, which then cancel. Equal gaps
    show no noise to compare them with: nan too, unless the runs repeat each other (_repeats).
    """
    gaps = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    centre, error = mean_se(gaps)
    tested = gaps.size > 1 and not _alike(gaps)
    margin = error * stdtrit(gaps.size - 1, 0.5 + confidence / 2) if tested else math.nan
    margin = 0.0 if _repeats(ours, theirs) else margin
    return centre, float(centre - margin), float(centre + margin)


def paired_p(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Two-sided p of Student's paired test that ours - theirs has mean 0; nan where there is none.

    There is none for one pair, and none for equal gaps unless the runs repeat each other.
    """
    gaps = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    centre, error = mean_se(gaps)
    if _repeats(ours, theirs):
        return 1.0
    if _alike(gaps):
        return math.nan
    return float(2 * stdtr(gaps.size - 1, -abs(centre) / error))


def _repeats(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether each run equals its partner and seeds differ.

    Where all runs have one value, such as 0, the metric is at its floor and measures no difference.
    """
    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return x.size > 1 and bool((x == y).all()) and not _alike(x)


def _alike(gaps: np.ndarray) -> bool:
    """Whether numbers differ by no more than their rounding."""
    return bool(np.ptp(gaps) <= 1e-12 * np.abs(gaps).max())


def equivalent(ours: np.ndarray, theirs: np.ndarray, margin: float) -> bool:
    """Whether two one-sided paired tests at 5 % show |mean of ours - theirs| < margin.

    They do where the 90 % interval lies inside the margin (Schuirmann 1987); never for one pair.
    """
    _, low, high = paired_difference(ours, theirs, confidence=0.9)
    return -margin < low and high < margin


def holm(p: Sequence[float]) -> np.ndarray:
    """p values adjusted for how many there are, in their order; nan is no test (Holm 1979).

    Of m, the k-th smallest becomes max over j <= k of (m - j + 1) p_j, at most 1.
    """
    given = np.asarray(p, np.float64)
    order = np.argsort(given)  # nan last
    factors = np.count_nonzero(~np.isnan(given)) - np.arange(given.size)
    adjusted = np.full(given.size, math.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * given[order]), 1)
    return adjusted


def _check_tasks(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f'{len(ours)} and {len(theirs)} tasks: both need the same, at least one')
    if any(np.size(runs) == 0 for runs in [*ours, *theirs]):
        raise ValueError('both need at least one run in each task')


def _wins(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Share of pairs in which x is larger, ties half: x [..., n], y [..., m] -> [...]."""
    larger = (x[..., :, None] > y[..., None, :]).mean((-2, -1))
    return larger + 0.5 * (x[..., :, None] == y[..., None, :]).mean((-2, -1))
