"""Signs that predict collapse, on synthetic runs with figures known by hand."""

import math

import numpy as np
import pytest

from experiments import collapse_signs
from experiments.collapse_signs import Area, Course, Sign

ENTROPY = Sign('policy/entropy', 1)
HEALTHY, COLLAPSED = (0.4, 0.4, 0.4, 0.4, 0.4), (0.4, 0.4, 0.1, 0.1, 0.1)  # every 10 steps


def rows_of(success, changes, metric='policy/entropy'):
    """41 steps; the metric is 1 in the first five, then 1 + changes[step - 5] or the last one."""
    rows = [{'step': step, metric: 1.0, 'tokens': 0, 'seconds': 0.0} for step in range(41)]
    for step in range(5, 41):
        rows[step][metric] = 1 + changes[min(step - 5, len(changes) - 1)]
    for k, value in enumerate(success):
        rows[10 * k]['eval/success'] = value
    return rows


def course(arm, seed, success, *changes):
    return Course(arm, seed, rows_of(success, changes))


def changes_of(courses, first=5, last=30):
    return [collapse_signs.early_change(c.rows, ENTROPY, first, last) for c in courses]


# ---- a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'success, collapsed, onset',
    [
        (HEALTHY, False, math.nan),
        (COLLAPSED, True, 20),
        ((0.4, 0.3, 0.3, 0.3, 0.3), True, 10),  # exactly three quarters
        ((0.4, 0.1, 0.4, 0.4, 0.4), False, math.nan),  # a dip that recovers
        ((0.2, 0.4, 0.1, 0.35, 0.1), True, 40),  # mean .183; .35 is above .3
        ((0.4, 0.4, 0.4, 0.4, 0.2), False, math.nan),  # at the last validation only: mean .33
        ((0.1, 0.4, 0.1, 0.1, 0.4), True, math.nan),  # mean .2, but the last one is the best
        ((0.0, 0.0, 0.0, 0.0, 0.0), False, math.nan),  # nothing to lose
    ],
)
def test_collapse_and_its_first_step_by_hand(success, collapsed, onset):
    run = course('a', 0, success, 0.0)
    assert run.collapsed == collapsed
    np.testing.assert_equal(run.onset, onset)


def test_a_change_is_relative_to_the_start_and_in_the_direction_of_the_sign():
    # Steps 0 to 4 have mean 2; 3 is 50 % above it, 1 is 50 % below.
    rows = [{'step': step, 'x': x} for step, x in enumerate((1, 3, 2, 2, 2, 3, 1, math.nan, 2))]
    steps, values = collapse_signs.change(rows, Sign('x', 1))
    np.testing.assert_array_equal(steps, [5, 6, 8])  # nan was not measured
    np.testing.assert_array_equal(values, [0.5, -0.5, 0])
    np.testing.assert_array_equal(collapse_signs.change(rows, Sign('x', -1))[1], [-0.5, 0.5, 0])
    assert collapse_signs.early_change(rows, Sign('x', 1), 5, 5) == 0.5
    assert collapse_signs.early_change(rows, Sign('x', 1), 6, 8) == -0.25
    assert math.isnan(collapse_signs.early_change(rows, Sign('x', 1), 9, 30))
    assert math.isnan(collapse_signs.early_change(rows, Sign('y', 1), 5, 30))
    # Below 0 a rise is still a rise; a start of 0 has no relative change
    below = [{'step': step, 'x': x} for step, x in enumerate((-2, -2, -2, -2, -2, -1))]
    np.testing.assert_array_equal(collapse_signs.change(below, Sign('x', 1))[1], [0.5])
    zero = [{'step': step, 'x': x} for step, x in enumerate((0, 0, 0, 0, 0, 1))]
    assert collapse_signs.change(zero, Sign('x', 1))[1].size == 0


# ---- runs --------------------------------------------------------------------------------------

MIXED = [
    course('a', 0, COLLAPSED, 0.5),
    course('a', 1, HEALTHY, 0.1),
    course('a', 2, HEALTHY, 0.6),
    course('b', 0, COLLAPSED, 0.2),
    course('b', 1, HEALTHY, 0.1),
    course('c', 2, HEALTHY, 0.0),
]


def test_the_area_by_hand():
    # .5 and .2 each beat .1, .1 and 0 but not .6: 6 of 8 pairs.
    pooled = collapse_signs.separation(MIXED, changes_of(MIXED))
    assert pooled.auc == 6 / 8 and pooled.pairs == 8
    # a: .5 beats .1 but not .6; b: .2 beats .1; c has no collapsed run. (1/2 x 2 + 1 x 1) / 3
    within = collapse_signs.separation(MIXED, changes_of(MIXED), within=True)
    assert within.auc == pytest.approx(2 / 3) and within.pairs == 3
    # Ties count half; a run in which the sign was not measured does not count
    assert collapse_signs.separation(MIXED, [0.0] * 6).auc == 0.5
    assert collapse_signs.separation(MIXED, [0.5, 0.1, math.nan, 0.2, 0.1, 0.0]).auc == 1
    np.testing.assert_equal(collapse_signs.separation(MIXED[1:3], [0.1, 0.6]), Area())
    one_kind = [MIXED[0], MIXED[4]]  # of two arms
    np.testing.assert_equal(collapse_signs.separation(one_kind, [1.0, 2.0], within=True), Area())


# ---- the command -------------------------------------------------------------------------------
