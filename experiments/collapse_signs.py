"""Which signs predict collapse: early changes of metrics against the end of a run (NumPy).

A sign is a metric and the direction that is considered bad. Its value is its change relative to the
start of the same run, so that runs of different arms can be compared; larger is worse.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SUCCESS = 'eval/success'
COLLAPSED = 0.75  # largest share of the best validation that counts as collapsed
START = 4  # last step of the baseline
Rows = Sequence[Mapping[str, float]]


class Sign(NamedTuple):
    metric: str
    direction: int  # 1: rising is bad, -1: falling is bad


SIGNS = {
    'return std falls': Sign('group/return_std', -1),
    'entropy rises': Sign('policy/entropy', 1),
    'entropy falls': Sign('policy/entropy', -1),
    'gradient rises': Sign('policy/grad_norm', 1),
    'valid format falls': Sign('rollout/valid_format', -1),
    'success falls': Sign('rollout/success', -1),
    'KL to the sampler rises': Sign('policy/kl_old_k3', 1),
    'information falls': Sign('collapse/mi_share', -1),
}


class Course(NamedTuple):
    """A finished run."""

    arm: str  # runs of an arm differ only in their seed
    seed: Any
    rows: Rows

    @property
    def collapsed(self) -> bool:
        """Whether the last three validations average at most COLLAPSED of a nonzero best."""
        _, success = series(self.rows, SUCCESS)
        best = success.max(initial=0.0)
        return bool(best > 0 and success[-3:].mean() <= COLLAPSED * best)

    @property
    def onset(self) -> float:
        """Step of the validation at which success falls for good; nan = not, or not collapsed.

        It and all later validations are at most COLLAPSED of the best one before it.
        """
        steps, success = series(self.rows, SUCCESS)
        first = math.nan
        for k in range(success.size - 1, 0, -1):
            best = success[:k].max()
            if best <= 0 or success[k:].max() > COLLAPSED * best:
                break
            first = float(steps[k])
        return first if self.collapsed else math.nan


class Area(NamedTuple):
    """Area under the ROC curve: P(a collapsed run has the larger value), ties half."""

    auc: float = math.nan
    low: float = math.nan  # 95 % interval, seeds resampled
    high: float = math.nan
    pairs: int = 0


class Alarm(NamedTuple):
    """A threshold calibrated on healthy runs of some seeds, and its alarms on the other seeds."""

    threshold: float
    leads: tuple[float, ...]  # steps from the alarm to the collapse, by run; nan without an alarm
    false: int  # number of healthy runs with an alarm
    healthy: int


# ---- a run -------------------------------------------------------------------------------------


def series(rows: Rows, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a metric, [n] each, without non-finite values."""
    points = [(row['step'], row[metric]) for row in rows if metric in row]
    table = np.array(points, np.float64).reshape(-1, 2)
    return tuple(table[np.isfinite(table[:, 1])].T)


def change(rows: Rows, sign: Sign) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) after the start: (x - start) / |start| in the bad direction.

    start: mean over steps 0 to START. Both are empty if it is 0 or was not measured.
    """
    steps, values = series(rows, sign.metric)
    first = values[steps <= START]
    start = first.mean() if first.size else 0.0
    if start == 0:
        return np.empty(0), np.empty(0)
    after = steps > START
    return steps[after], sign.direction * (values[after] - start) / abs(start)


def early_change(rows: Rows, sign: Sign, first: int, last: int) -> float:
    """Return the mean change over steps first to last, or nan if it was not measured."""
    steps, values = change(rows, sign)
    inside = values[(steps >= first) & (steps <= last)]
    return float(inside.mean()) if inside.size else math.nan


# ---- runs --------------------------------------------------------------------------------------


def separation(
    courses: Sequence[Course],
    values: Sequence[float],
    *,
    within: bool = False,
    resamples: int = 10_000,
    seed: int = 0,
) -> Area:
    """Return how well values [N] separate collapsed from healthy runs; nan values are left out.

    within: pairs of one arm only, which gives the mean of the arms' areas, weighted by pairs. The
    interval resamples seeds, because the runs of a seed share start and levels.
    """
    known = [(c, x) for c, x in zip(courses, values, strict=True) if not math.isnan(x)]
    sides = [[pair for pair in known if pair[0].collapsed == side] for side in (True, False)]
    collapsed, healthy = ([course for course, _ in side] for side in sides)
    x, y = (np.array([value for _, value in side]) for side in sides)
    paired = [[not within or a.arm == b.arm for b in healthy] for a in collapsed]
    paired = np.array(paired, bool).reshape(x.size, y.size)
    if not paired.any():
        return Area()
    wins = paired * ((x[:, None] > y) + 0.5 * (x[:, None] == y))
    seeds = list(dict.fromkeys(course.seed for course, _ in known))
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(seeds), [1 / len(seeds)] * len(seeds), resamples)  # [R, seeds]
    # Draws of each run, [R, collapsed] and [R, healthy]; a pair has the product as its weight
    n, m = (drawn[:, [seeds.index(c.seed) for c in side]] for side in (collapsed, healthy))
    counts, sums = ((n @ of_pairs * m).sum(axis=1) for of_pairs in (paired, wins))
    low, high = np.quantile(sums[counts > 0] / counts[counts > 0], (0.025, 0.975)).tolist()
    if low == high:  # one seed, or identical draws: resampling gives no interval
        low = high = math.nan
    return Area(float(wins.sum() / paired.sum()), low, high, int(paired.sum()))


def alarm(courses: Sequence[Course], sign: Sign, calibration: Sequence[Any]) -> Alarm:
    """Return the alarm whose threshold is the largest change in healthy calibration runs.

    Leads are measured on collapsed runs of the other seeds that have an onset. Without a healthy
    calibration run there is no alarm.
    """
    healthy = [course for course in courses if not course.collapsed]
    threshold = max(
        (x for c in healthy if c.seed in calibration for x in change(c.rows, sign)[1]),
        default=math.nan,
    )
    alarms = [_crossing(c.rows, sign, threshold) for c in healthy if c.seed not in calibration]
    collapsed = [c for c in courses if c.collapsed and c.seed not in calibration]
    leads = [c.onset - _crossing(c.rows, sign, threshold) for c in collapsed if c.onset > 0]
    raised = sum(not math.isnan(step) for step in alarms)
    return Alarm(float(threshold), tuple(leads), raised, len(alarms))


def _crossing(rows: Rows, sign: Sign, threshold: float) -> float:
    """Return the first step at which the change exceeds the threshold, or nan."""
    steps, values = change(rows, sign)
    above = steps[values > threshold]
    return float(above[0]) if above.size else math.nan
