"""Group filters: by hand, and with the defects of the references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.rl import filtering
from agentrl_jax.rl.algorithm import Filter

SOKOBAN_LIKE = jnp.array([5.2, 4.8, 3.6, 2.9, 0.25, 0.2, 0.1, 0.0])


def indices(mask):
    return np.flatnonzero(mask).tolist()


def rollout_of(returns, healthy=None):
    """Return episodes of one turn and one token with these returns."""
    returns = np.asarray(returns)
    faulty = () if healthy is None else np.flatnonzero(~np.asarray(healthy))
    return toy.rollout_of([[(1, 1)]] * len(returns), returns[:, None], length=2, faulty=faulty)


compiled = jax.jit(Filter.select, static_argnums=0, static_argnames=('groups', 'group_size'))


def select(chosen, episodes, groups):
    """Apply a Filter to returns or to a rollout."""
    episodes = rollout_of(episodes) if hasattr(episodes, 'dtype') else episodes
    return compiled(chosen, episodes, groups=groups, group_size=len(episodes.tokens) // groups)


def test_the_widest_groups_are_selected_as_rows_in_batch_order():
    returns = jnp.array([0.0, 0, 0, 3, 1, 1, 0, 5])  # stds 0, 2.1, 0, 3.5
    selected, rows, keep, metrics = select(Filter(keep=0.5), returns, 4)
    assert rows.tolist() == [2, 3, 6, 7] and rows.dtype == jnp.int32
    assert keep.all() and metrics['filter/kept'] == 0.5
    assert metrics['filter/group_std_max'] == pytest.approx(12.5**0.5)  # of 0 and 5
    assert metrics['filter/group_std_kept'] == pytest.approx((4.5**0.5 + 12.5**0.5) / 2)
    np.testing.assert_array_equal(selected.returns, [0, 3, 0, 5])
    # if the other rows stay, the same rows have weight and are first
    _, rows, keep, *_ = select(Filter('varied'), returns, 4)
    assert rows.tolist() == [2, 3, 6, 7, 0, 1, 4, 5] and indices(keep) == [0, 1, 2, 3]
    # the refilled buffer contains only kept groups
    _, rows, keep, *_ = select(Filter('varied', refill=1), returns, 4)
    assert rows.tolist() == list(range(8)) and keep.all()


@pytest.mark.parametrize(
    'chosen, groups, order, counted',
    [
        (Filter(), [0, 1, 2, 3], 'all', 4),
        (Filter(keep=0.5), [1, 2], 'compact', 2),
        (Filter(keep=0.5, smallest=True), [0, 3], 'compact', 2),
        (Filter(keep=0.01), [2], 'compact', 1),  # at least one
        (Filter('top_p', p=0.5), [2], 'kept_first', 4),
        (Filter('top_p', p=0.575), [1, 2], 'kept_first', 4),
        (Filter('top_p', p=1.0), [1, 2, 3], 'kept_first', 4),
        (Filter('top_p_softmax', p=1.0), [0, 1, 2, 3], 'kept_first', 4),
        (Filter('min_p', p=0.5), [1, 2], 'kept_first', 4),
        (Filter('min_p', p=0.0), [1, 2, 3], 'kept_first', 4),
        (Filter('varied'), [1, 2, 3], 'kept_first', 4),
        (Filter('varied', refill=2), [1, 2, 3], 'all', 4),
        (Filter('all'), [0, 1, 2, 3], 'all', 4),
    ],
    ids=str,
)
def test_every_rule_keeps_its_groups(chosen, groups, order, counted):
    # stds (0, 2, 4, 1) / sqrt(2), sum 4.95: .575 * 4.95 - .01 is above 4 / sqrt(2)
    rollout = rollout_of([5.0, 5, 0, 2, 0, 4, 0, 1])
    _, rows = chosen.keep_rows(rollout, groups=4, group_size=2)
    assert indices(rows.reshape(4, 2).all(1)) == groups and rows.sum() == 2 * len(groups)
    assert (chosen.order(4), chosen.kept(4)) == (order, counted)


def test_ties_go_to_the_earlier_group():
    scores = jnp.array([1.0, 2, 2, 2, 0])
    assert indices(filtering.keep_top_k(scores, keep=2)) == [1, 2]
    assert indices(filtering.keep_top_k(scores, keep=1, smallest=True)) == [4]


def test_top_p_golden_counts():
    # linear: sum 17.05, .9 * sum - .01 = 15.335; 5.2, 10, 13.6, 16.5 -> 4.  softmax: 3
    assert indices(filtering.keep_top_p(SOKOBAN_LIKE, p=0.9)) == [0, 1, 2, 3]
    assert indices(filtering.keep_top_p_softmax(SOKOBAN_LIKE, p=0.9)) == [0, 1, 2]
    zeros = jnp.zeros(8)
    assert indices(filtering.keep_top_p(zeros, p=0.9)) == []
    assert indices(filtering.keep_top_p_softmax(zeros, p=0.9)) == list(range(8))
    assert indices(filtering.RULES['varied'](jnp.array([0.0, 0.3, 0.0, 2.0]))) == [1, 3]
    # small stds, as in FrozenLake, have nearly equal mass, 1.68 to 1 of 10.38: 9.38 > .9 * 10.38
    lake = jnp.array([0.52, 0.45, 0.4, 0.3, 0.25, 0.0, 0.0, 0.0])
    assert len(indices(filtering.keep_top_p_softmax(lake, p=0.9))) == 7


def test_top_p_does_not_depend_on_the_order_of_scores():
    order = np.array([3, 0, 7, 5, 1, 6, 2, 4])
    assert indices(filtering.keep_top_p(SOKOBAN_LIKE[order], p=0.9)) == sorted(
        int(np.flatnonzero(order == g)[0]) for g in (0, 1, 2, 3)
    )
    assert indices(filtering.keep_top_p_softmax(SOKOBAN_LIKE[order], p=0.9)) == sorted(
        int(np.flatnonzero(order == g)[0]) for g in (0, 1, 2)
    )
