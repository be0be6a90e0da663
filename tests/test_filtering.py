"""Group filters: by hand, against exhaustive search, and with the defects of the references."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import advantages, filtering

SETTINGS = settings(max_examples=25, deadline=None)
SOKOBAN_LIKE = jnp.array([5.2, 4.8, 3.6, 2.9, 0.25, 0.2, 0.1, 0.0])


def kept(mask):
    return np.flatnonzero(mask).tolist()


def rollout_of(returns, healthy=None):
    """Episodes of one turn and one token with the given returns."""
    returns = np.asarray(returns)
    faulty = () if healthy is None else np.flatnonzero(~np.asarray(healthy))
    return toy.rollout_of([[(1, 1)]] * len(returns), returns[:, None], length=2, faulty=faulty)


def select(played, group_size, rule, *, order, count=0, soft=False, scaling='none', **settings):
    """filtering.select of returns or a rollout, as a config would have it called."""
    played = rollout_of(played) if hasattr(played, 'dtype') else played
    keep_fn = functools.partial(filtering.keep_rows, group_size=group_size, rule=rule, **settings)
    return filtering.select(
        played,
        keep_fn=keep_fn,
        group_size=group_size,
        order=order,
        count=count,
        soft=soft,
        scaling=scaling,
    )


def test_scores_by_hand_without_faulty_members():
    # (1, 2, 6): std sqrt(7);  (1, faulty 99, 3): std sqrt(2);  one healthy: 0
    returns = jnp.array([1.0, 2, 6, 1, 99, 3, 5, 6, 7])
    healthy = jnp.array([1, 1, 1, 1, 0, 1, 0, 1, 0], bool)
    scores = filtering.group_scores(returns, healthy, group_size=3)
    np.testing.assert_allclose(scores, [7**0.5, 2**0.5, 0], rtol=1e-6)


def test_the_widest_groups_are_selected_as_rows_in_batch_order():
    returns = jnp.array([0.0, 0, 0, 3, 1, 1, 0, 5])  # stds 0, 2.1, 0, 3.5
    taken, rows, keep, factors, _ = select(returns, 2, 'top_k', keep=2, order='compact', count=4)
    assert rows.tolist() == [2, 3, 6, 7] and rows.dtype == jnp.int32
    assert keep.all() and factors is None
    np.testing.assert_array_equal(taken.returns, [0, 3, 0, 5])


def test_weights_and_compacting_keep_the_same_rows():
    rng = np.random.default_rng(0)
    returns, healthy = jnp.asarray(rng.normal(size=24)), jnp.asarray(rng.random(24) < 0.8)
    played = rollout_of(returns, healthy)
    rows = select(played, 4, 'top_k', keep=3, order='compact', count=12)[1]
    _, mask = filtering.keep_rows(played, group_size=4, rule='top_k', keep=3)
    assert kept(mask) == rows.tolist()


def test_the_filter_ranks_raw_returns_and_normalised_ones_could_not_be_ranked():
    """RAGEN ranked scores it had normalised in place: every group then has std 1."""
    returns = jnp.array([0.0, 0.1, 0, 10.0, 0, 1.0])  # raw: the second group is the widest
    healthy = jnp.ones(6, bool)
    scores = filtering.group_scores(returns, healthy, group_size=2)
    assert kept(filtering.keep_top_k(scores, keep=1)) == [1]
    normal = advantages.group_normalize(returns, healthy, group_size=2)
    useless = filtering.group_scores(normal, healthy, group_size=2)
    np.testing.assert_allclose(useless, np.ones(3), atol=1e-4)


def test_ties_go_to_the_earlier_group():
    scores = jnp.array([1.0, 2, 2, 2, 0])
    assert kept(filtering.keep_top_k(scores, keep=2)) == [1, 2]
    assert kept(filtering.keep_top_k(scores, keep=1, smallest=True)) == [4]


def test_top_p_golden_counts():
    # linear: sum 17.05, .9 * sum - .01 = 15.335; 5.2, 10, 13.6, 16.5 -> 4.  softmax: 3
    assert kept(filtering.keep_top_p(SOKOBAN_LIKE, p=0.9)) == [0, 1, 2, 3]
    assert kept(filtering.keep_top_p_softmax(SOKOBAN_LIKE, p=0.9)) == [0, 1, 2]
    zeros = jnp.zeros(8)
    assert kept(filtering.keep_top_p(zeros, p=0.9, include_zero=True)) == []
    assert kept(filtering.keep_top_p_softmax(zeros, p=0.9)) == list(range(8))
    # stds as small as FrozenLake's have nearly equal mass, 1.68 to 1 of 10.38: 9.38 > .9 * 10.38
    lake = jnp.array([0.52, 0.45, 0.4, 0.3, 0.25, 0.0, 0.0, 0.0])
    assert len(kept(filtering.keep_top_p_softmax(lake, p=0.9))) == 7


def test_top_p_of_one_keeps_all_but_excluded_zeros():
    assert len(kept(filtering.keep_top_p(SOKOBAN_LIKE, p=1.0, include_zero=True))) == 8
    assert len(kept(filtering.keep_top_p(SOKOBAN_LIKE, p=1.0))) == 7
    assert len(kept(filtering.keep_top_p_softmax(SOKOBAN_LIKE, p=1.0, include_zero=False))) == 7


def test_top_p_keeps_in_batch_order_whatever_the_order_of_scores():
    order = np.array([3, 0, 7, 5, 1, 6, 2, 4])
    assert kept(filtering.keep_top_p(SOKOBAN_LIKE[order], p=0.9)) == sorted(
        int(np.flatnonzero(order == g)[0]) for g in (0, 1, 2, 3)
    )
    assert kept(filtering.keep_top_p_softmax(SOKOBAN_LIKE[order], p=0.9)) == sorted(
        int(np.flatnonzero(order == g)[0]) for g in (0, 1, 2)
    )


def test_all_zero_softmax_without_zeros_keeps_nothing():
    assert kept(filtering.keep_top_p_softmax(jnp.zeros(4), p=0.9, include_zero=False)) == []


def test_min_p_and_percentile_by_hand():
    # .5 * 5.2 = 2.6;  ranks [round(.25 * 8), round(.5 * 8)) = [2, 4)
    assert kept(filtering.keep_min_p(SOKOBAN_LIKE, p=0.5)) == [0, 1, 2, 3]
    assert kept(filtering.keep_min_p(jnp.zeros(3), p=0.5)) == []
    assert kept(filtering.keep_percentile(SOKOBAN_LIKE, low=0.25, high=0.5)) == [2, 3]


def test_quartiles_partition_the_groups():
    bands = [
        filtering.keep_percentile(SOKOBAN_LIKE, low=q / 4, high=q / 4 + 0.25) for q in range(4)
    ]
    np.testing.assert_array_equal(sum(b.astype(int) for b in bands), np.ones(8))


@SETTINGS
@given(seed=st.integers(0, 2**31), keep=st.integers(1, 4))
def test_within_group_choice_has_the_largest_variance_of_all_subsets(seed, keep):
    rng = np.random.default_rng(seed)
    returns = rng.normal(size=10).astype(np.float32)
    healthy = rng.random(10) < 0.8
    mask = filtering.keep_within_groups(
        jnp.asarray(returns), jnp.asarray(healthy), group_size=5, keep=keep
    )
    for g in range(2):
        members = [b for b in range(5 * g, 5 * g + 5) if healthy[b]]
        chosen = [b for b in kept(mask) if 5 * g <= b < 5 * g + 5]
        size = min(keep, len(members))
        assert len(chosen) == size and set(chosen) <= set(members)
        best = max(
            (returns[list(s)].var() for s in itertools.combinations(members, size)), default=0
        )
        if size:
            assert returns[chosen].var() >= best - 1e-5


def test_soft_weights_and_scales_by_hand():
    np.testing.assert_allclose(
        filtering.soft_weights(jnp.array([1.0, 4.0]), group_size=2), [0.25, 0.25, 1, 1], rtol=1e-5
    )
    np.testing.assert_array_equal(filtering.soft_weights(jnp.zeros(2), group_size=1), [0, 0])
    ratio = jnp.float32(0.25)
    scales = [filtering.kept_scale(ratio, scaling=s) for s in ('none', 'linear', 'sqrt')]
    np.testing.assert_allclose(scales, [1, 0.25, 0.5])


def test_every_rule_is_in_the_dict_and_gives_a_mask_of_groups():
    arguments = {
        'top_k': {'keep': 2},
        'percentile': {'low': 0.0, 'high': 0.5},
        'all': {},
        'varied': {},
    }
    for name, rule in filtering.RULES.items():
        mask = rule(SOKOBAN_LIKE, **arguments.get(name, {'p': 0.9}))
        assert mask.dtype == bool and mask.shape == (8,)


def test_metrics_by_hand():
    keep = filtering.keep_top_k(SOKOBAN_LIKE, keep=2)
    metrics = filtering.filter_metrics(SOKOBAN_LIKE, jnp.repeat(keep, 3).reshape(8, 3))
    assert metrics['filter/group_std_kept'] == pytest.approx(5.0)
    assert metrics['filter/group_std_max'] == pytest.approx(5.2)
    assert metrics['filter/kept'] == pytest.approx(0.25)


def test_varied_groups_are_those_with_any_spread():
    scores = jnp.array([0.0, 0.3, 1e-7, 2.0])
    assert kept(filtering.keep_varied(scores)) == [1, 3]


def test_refill_packs_kept_groups_until_it_is_full():
    held = {'x': jnp.zeros(6), 'y': jnp.zeros((6, 2))}  # room for three groups of two
    fresh = {'x': jnp.arange(1.0, 9.0), 'y': jnp.ones((8, 2))}
    keep = jnp.array([False, True, True, False])
    held, count = filtering.refill(held, jnp.int32(0), fresh, keep, group_size=2)
    np.testing.assert_array_equal(held['x'], [3, 4, 5, 6, 0, 0])
    assert count == 2
    held, count = filtering.refill(held, count, fresh, jnp.ones(4, bool), group_size=2)
    np.testing.assert_array_equal(held['x'], [3, 4, 5, 6, 1, 2])  # three groups did not fit
    assert count == 3 and held['y'].all()
    same, count = filtering.refill(held, count, fresh, jnp.ones(4, bool), group_size=2)
    np.testing.assert_array_equal(same['x'], held['x'])
    assert count == 3
