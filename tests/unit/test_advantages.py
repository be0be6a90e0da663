"""Advantages against hand arithmetic, published golden vectors and float64 double loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import advantages as adv
from agentrl_jax.rl import recursions as rec

SETTINGS = settings(max_examples=12, deadline=None)
NORMS = ('std', 'mean', 'leave_one_out')
gae, bi_level_gae, turn_wise_gae = map(jax.jit, (rec.gae, rec.bi_level_gae, rec.turn_wise_gae))


def row(*numbers, dtype=jnp.float32):
    return jnp.asarray([numbers], dtype)


def episode_layout(rng, rows, length, turns):
    """Return a random (mask, turn): turns in order, each with observation, then action tokens."""
    mask, turn = np.zeros((rows, length), bool), np.full((rows, length), -1, np.int32)
    for b in range(rows):
        t = 0
        for k in range(rng.integers(0, turns + 1)):
            observed, acted = rng.integers(0, 4), rng.integers(1, 4)
            turn[b, t : t + observed + acted] = k
            mask[b, t + observed : t + observed + acted] = True
            t += observed + acted
    return mask, turn


# ---- references: one token after another, in float64 -----------------------------------------


def reference_gae(rewards, values, mask, gamma, lam):
    out = np.zeros(rewards.shape)
    for b in range(rewards.shape[0]):
        next_value = next_advantage = 0.0
        for t in reversed(np.flatnonzero(mask[b])):
            delta = rewards[b, t] + gamma * next_value - values[b, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[b, t]
            out[b, t] = next_advantage
    return out


def reference_ends(mask, turn):
    out = np.zeros(mask.shape, bool)
    for b in range(mask.shape[0]):
        for k in set(turn[b][mask[b]]):
            out[b, np.flatnonzero(mask[b] & (turn[b] == k))[-1]] = True
    return out


def reference_turn_sums(rewards, mask, turn):
    out = np.zeros(rewards.shape)
    for b, t in np.argwhere(reference_ends(mask, turn)):
        out[b, t] = rewards[b][mask[b] & (turn[b] == turn[b, t])].sum()
    return out


def reference_bi_level(rewards, values, mask, turn, gamma, turn_gamma, lam):
    ends = reference_ends(mask, turn)
    summed = reference_turn_sums(rewards, mask, turn)
    high = reference_gae(summed, values, ends, turn_gamma, lam) - np.where(
        ends, summed - rewards, 0
    )
    out = np.zeros(rewards.shape)
    for b in range(rewards.shape[0]):
        next_value = next_advantage = 0.0
        for t in reversed(np.flatnonzero(mask[b])):
            if ends[b, t]:
                out[b, t] = high[b, t]
            else:
                delta = rewards[b, t] + gamma * next_value - values[b, t]
                out[b, t] = delta + gamma * lam * next_advantage
            next_value, next_advantage = values[b, t], out[b, t]
    return out


def reference_turn_wise(rewards, values, mask, turn, turn_gamma, lam):
    summed = reference_turn_sums(rewards, mask, turn)
    high = reference_gae(summed, values, reference_ends(mask, turn), turn_gamma, lam)
    out = np.zeros(rewards.shape)
    for b, t in np.argwhere(mask):
        end = np.flatnonzero(mask[b] & (turn[b] == turn[b, t]))[-1]
        out[b, t] = high[b, end]
    return out


def reference_group(returns, healthy, group_size, norm):
    out = np.zeros(returns.shape)
    for first in range(0, len(returns), group_size):
        members = [b for b in range(first, first + group_size) if healthy[b]]
        for b in members:
            r = returns[members]
            if group_size == 1:
                out[b] = returns[b]
            elif len(members) > 1:
                out[b] = returns[b] - r.mean()
                if norm == 'std':
                    std = r.std(ddof=1)
                    out[b] = out[b] / (std + 1e-6) if std > 1e-9 else 0
                if norm == 'leave_one_out':
                    out[b] = returns[b] - (r.sum() - returns[b]) / (len(r) - 1)
    return out


# ---- placement -------------------------------------------------------------------------------


def test_rewards_land_on_the_last_action_token_of_their_turn_by_hand():
    # turns 0 0 0 0 | 1 1 1 | pad; the program, not the policy, wrote the last token of turn 0
    turn = row(0, 0, 0, 0, 1, 1, 1, -1, dtype=jnp.int32)
    mask = row(0, 1, 1, 0, 0, 1, 1, 0, dtype=bool)
    ends = adv.turn_ends(mask, turn)
    np.testing.assert_array_equal(ends, [[0, 0, 1, 0, 0, 0, 1, 0]])
    placed = rec.place_on_turn_ends(row(0.5, -2.0, 0.0), mask, turn)
    np.testing.assert_array_equal(placed, [[0, 0, 0.5, 0, 0, 0, -2, 0]])
    placed = rec.place_on_episode_end(jnp.array([-1.5]), mask)
    np.testing.assert_array_equal(placed, [[0, 0, 0, 0, 0, 0, -1.5, 0]])
    np.testing.assert_array_equal(
        adv.to_tokens(row(3.0, 4.0), turn, mask), [[0, 3, 3, 0, 0, 4, 4, 0]]
    )


def test_a_turn_with_zero_reward_is_a_boundary():
    """RAGEN detects turn ends by non-zero rewards, so it misses turns without reward."""
    turn = row(0, 0, 1, 1, dtype=jnp.int32)
    mask = jnp.ones((1, 4), bool)
    np.testing.assert_array_equal(adv.turn_ends(mask, turn), [[0, 1, 0, 1]])
    rewards = rec.place_on_turn_ends(row(0.0, 1.0), mask, turn)
    kwargs = dict(gamma=1.0, turn_gamma=0.5, lam=1.0)
    two = bi_level_gae(rewards, jnp.zeros((1, 4)), mask, turn, **kwargs)
    # turn 1: A = 1; turn 0: 0 + .5 * 1
    np.testing.assert_allclose(two, [[0.5, 0.5, 1, 1]])
    all_zero = bi_level_gae(0 * rewards, jnp.zeros((1, 4)), mask, turn, **kwargs)
    np.testing.assert_array_equal(all_zero, np.zeros((1, 4)))


# ---- golden vectors of the references -----------------------------------------------------------

TENTHS = row(*(0.1 * i for i in range(1, 11)))
TWO_TURNS = row(0, 0, 0, 0, 0, 1, 1, 1, 1, 1, dtype=jnp.int32)
REWARD_AT_4_AND_9 = row(0, 0, 0, 0, 1, 0, 0, 0, 0, 1)
ALL = jnp.ones((1, 10), bool)
GAP = ALL.at[0, 5:7].set(False)


def bi_level(lam, mask=ALL):
    return bi_level_gae(
        REWARD_AT_4_AND_9, TENTHS, mask, TWO_TURNS, gamma=1.0, turn_gamma=0.95, lam=lam
    )


def test_bi_level_gae_golden_vectors():
    want = row(1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0)
    np.testing.assert_allclose(bi_level(1.0), want, atol=1e-6)
    np.testing.assert_allclose(bi_level(1.0) + TENTHS, [[1.95] * 5 + [1.0] * 5], atol=1e-6)
    white = [1.188, 1.0596, 0.9311, 0.8027, 0.6743, -0.6743, -0.8027, -0.9311, -1.0596, -1.188]
    np.testing.assert_allclose(rec.whiten(bi_level(1.0), ALL), [white], atol=5e-5)
    want = [1.552, 1.5284, 1.5036, 1.4775, 1.45, 0.371, 0.2852, 0.195, 0.1, 0]
    np.testing.assert_allclose(bi_level(0.95), [want], atol=5e-5)
    want = [1.552, 1.5284, 1.5036, 1.4775, 1.45, 0, 0, 0.195, 0.1, 0]
    np.testing.assert_allclose(bi_level(0.95, GAP), [want], atol=5e-5)


def test_gae_golden_vectors():
    """Over observations (mask 1111100111), and over several turns."""
    rewards = row(0, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    out = gae(rewards, TENTHS, GAP, gamma=1.0, lam=0.95)
    want = [1.4646, 1.4364, 1.4067, 1.3755, 1.3426, 0, 0, 1.0975, 1.05, 1.0]
    np.testing.assert_allclose(out, [want], atol=5e-5)
    mask = row(1, 1, 0, 0, 1, 1, dtype=bool)
    out = gae(row(0, 0.3, 0, 0, 0, 1), row(0.1, 0.2, 9, 9, 0.5, 0.6), mask, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(out, [[1.2, 1.1, 0, 0, 0.5, 0.4]], atol=1e-6)


def test_reward_to_go_crosses_observations():
    """verl zeroed all values before an observation span; mask 110011, reward at the end."""
    mask = row(1, 1, 0, 0, 1, 1, dtype=bool)
    out = rec.rewards_to_go(row(0, 0, 0, 0, 0, 1), mask, gamma=1.0)
    np.testing.assert_array_equal(out, [[1, 1, 0, 0, 1, 1]])
    out = rec.rewards_to_go(row(0, 0, 0, 0, 0, 1), mask, gamma=0.5)
    np.testing.assert_array_equal(out, [[0.125, 0.25, 0, 0, 0.5, 1]])


# ---- by hand -----------------------------------------------------------------------------------


def test_turn_wise_gae_by_hand():
    # ends at 1 and 4; V there .5 and .25; turn_gamma .5, lambda 1
    # A1 = 1 - .25 = .75; A0 = 0 + .5 * .25 - .5 + .5 * .75 = 0
    mask = row(1, 1, 0, 1, 1, dtype=bool)
    turn = row(0, 0, 1, 1, 1, dtype=jnp.int32)
    rewards, values = row(0, 0, 0, 0, 1), row(9, 0.5, 9, 9, 0.25)
    out = turn_wise_gae(rewards, values, mask, turn, turn_gamma=0.5, lam=1.0)
    np.testing.assert_allclose(out, [[0, 0, 0, 0.75, 0.75]], atol=1e-7)


def test_a_faulty_episode_is_excluded_from_the_baseline():
    # (1, faulty, 6): mean 3.5, std 5 / sqrt(2)
    returns, healthy = jnp.array([1.0, jnp.nan, 6.0]), jnp.array([True, False, True])
    for norm, want in (('mean', [-2.5, 0, 2.5]), ('leave_one_out', [-5, 0, 5])):
        got = adv.compare(returns, healthy, group_size=3, norm=norm)
        np.testing.assert_allclose(got, want)
    np.testing.assert_allclose(adv.group_std(returns, healthy, group_size=3), [12.5**0.5])
    np.testing.assert_allclose(
        adv.compare(returns, healthy, group_size=3, norm='std'),
        np.array([-1, 0, 1]) / 2**0.5,
        rtol=1e-6,
    )


@pytest.mark.parametrize('norm', NORMS)
def test_groups_without_a_comparison_are_defined(norm):
    function = functools.partial(adv.compare, norm=norm)
    returns = jnp.array([0.1, 0.1, 0.1, 5.0, 3.0, 4.0])
    healthy = jnp.array([True, True, True, False, True, False])
    # all equal: exactly 0, although the float32 mean of three 0.1 is not 0.1; one healthy: 0
    np.testing.assert_array_equal(function(returns, healthy, group_size=3), np.zeros(6))
    np.testing.assert_array_equal(  # groups of one: mean 0, std 1
        function(returns, healthy, group_size=1), jnp.where(healthy, returns, 0)
    )
    np.testing.assert_array_equal(function(returns, jnp.zeros(6, bool), group_size=3), np.zeros(6))


ORDERS = st.builds(
    lambda seed, exponent, turns, signed: (seed, 10.0**exponent, turns, signed),
    seed=st.integers(0, 2**31),
    exponent=st.floats(-3, 6),
    turns=st.integers(1, 50),
    signed=st.booleans(),
)


def reordered(order):
    """Return the same rewards in eight orders, float32 [8, 50], zero-padded, and the generator."""
    seed, magnitude, turns, signed = order
    rng = np.random.default_rng(seed)
    rewards = magnitude * rng.uniform(-1 if signed else 0.1, 1, turns)
    rows = np.zeros((8, 50), np.float32)
    for row in rows:
        row[:turns] = rng.permutation(rewards)
    return rows, rng


def compared(returns, scale=None):
    """Return all comparisons of one group of eight."""
    kwargs = dict(group_size=8, scale=scale)
    healthy = np.ones(8, bool)
    return [
        *(adv.compare(returns, healthy, norm=norm, **kwargs) for norm in NORMS),
        adv.group_std(returns, healthy, **kwargs),
        rec.whiten(
            returns[:, None], healthy[:, None], scale=None if scale is None else scale[:, None]
        ),
    ]


@settings(max_examples=25, deadline=None)
@given(order=ORDERS)
def test_the_order_of_summation_is_not_a_signal_at_any_magnitude(order):
    """For returns of 50 or more, the rounding of ten rewards led to advantages of .65."""
    rows, rng = reordered(order)
    one_by_one = np.cumsum(rows, axis=1, dtype=np.float32)[:, -1]
    exact = np.float32(rows.astype(np.float64).sum(1))
    for returns in (one_by_one, rows.sum(1), np.where(np.arange(8) % 2, one_by_one, exact)):
        for out in compared(returns, np.abs(rows).sum(1)):
            assert not np.asarray(out).any()
        if not order[3]:  # terms of one sign: the return has their magnitude
            for out in compared(returns):
                assert not np.asarray(out).any()
    # a difference of a thousandth of the total in one reward is a signal
    rows[rng.integers(8), 0] += 1e-3 * np.abs(rows).sum(1).max()
    for out in compared(rows.sum(1), np.abs(rows).sum(1)):
        assert np.asarray(out).any()


def test_a_return_that_cancels_is_compared_at_the_scale_of_its_terms():
    rows = np.array([[1000, -1000, 0.1], [0.1, 1000, -1000], [1000, 0.1, -1000]], np.float32)
    returns, scale = np.cumsum(rows, axis=1, dtype=np.float32)[:, -1], np.abs(rows).sum(1)
    kwargs = dict(group_size=3, norm='std', healthy=np.ones(3, bool))
    assert returns[0] != returns[1]
    assert not adv.compare(returns, scale=scale, **kwargs).any()
    assert adv.compare(returns, scale=np.abs(returns), **kwargs).any()
    rows[2, 1] = 0.2
    assert adv.compare(rows.sum(1), scale=scale, **kwargs).any()


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_return_that_is_not_finite_is_not_equal(bad):
    returns = np.array([1.0, bad], np.float32)
    assert not adv.equal(returns, np.ones(2, bool))
    assert not np.isfinite(adv.compare(returns, np.ones(2, bool), group_size=2, norm='std')).all()


def test_reward_normalisations_by_hand():
    # (0, 0, 0, 0, 5): mean 1, squares 4 * 1 + 16 = 20, std sqrt(5); highest 4 / sqrt(5) = 1.79
    returns = jnp.array([0.0, 0, 0, 0, 5])

    def run(norm, r=returns, size=5):
        return adv.compare(r, jnp.ones(len(r), bool), norm=norm, group_size=size)

    np.testing.assert_array_equal(run('none'), returns)
    np.testing.assert_allclose(run('mean'), [-1, -1, -1, -1, 4])
    np.testing.assert_allclose(run('std'), np.array([-1, -1, -1, -1, 4]) / 5**0.5, rtol=1e-6)
    np.testing.assert_array_equal(run('mean', size=1), returns)
    # nineteen 0 and one 20: mean 1, std sqrt(380 / 19) = 4.472; highest 19 / 4.472 = 4.25 -> 3
    lone = jnp.zeros(20).at[0].set(20.0)
    assert run('asym_clip', lone, 20)[0] == 3 and run('std', lone, 20)[0] > 4.2
    np.testing.assert_allclose(run('asym_clip', -lone, 20)[0], -1)
    np.testing.assert_array_equal(run('asym_clip', size=1), returns)  # 5 is not clipped to 3


def test_whitening_uses_the_statistics_of_its_second_mask():
    # over {1, 3}: mean 2, var 2
    x, mask, over = (
        row(1.0, 3.0, 7.0, 9.0),
        row(1, 1, 1, 0, dtype=bool),
        row(1, 1, 0, 0, dtype=bool),
    )
    np.testing.assert_allclose(
        rec.whiten(x, mask, over), np.array([[-1, 1, 5, 0]]) / 2**0.5, rtol=1e-6
    )
    np.testing.assert_array_equal(rec.whiten(x, jnp.zeros((1, 4), bool)), np.zeros((1, 4)))


@pytest.mark.parametrize('value, tokens', [(-0.1, 48), (7.7, 97)])
def test_whitening_equal_values_gives_exactly_zero(value, tokens):
    """Rounding (1e-8 in the mean of -0.1s) was amplified by 1 / sqrt(1e-8) = 1e4."""
    x = jnp.full((1, tokens), value).at[0, 1].add(3e-7 * value)
    mask = jnp.ones_like(x, bool)
    np.testing.assert_array_equal(rec.whiten(x, mask), np.zeros((1, tokens)))


# ---- against the loops, and properties ----------------------------------------------------------


@SETTINGS
@given(seed=st.integers(0, 2**31), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_recursions_equal_float64_loops(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    mask, turn = episode_layout(rng, 4, 20, 3)
    rewards, values = rng.normal(size=(2, 4, 20))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(adv.turn_ends(mask, turn), reference_ends(mask, turn))
        out = gae(rewards, values, mask, gamma=gamma, lam=lam)
        np.testing.assert_allclose(out, reference_gae(rewards, values, mask, gamma, lam), atol=1e-9)
        out = bi_level_gae(rewards, values, mask, turn, gamma=gamma, turn_gamma=0.95, lam=lam)
        want = reference_bi_level(rewards, values, mask, turn, gamma, 0.95, lam)
        np.testing.assert_allclose(out, want, atol=1e-9)
        out = turn_wise_gae(rewards, values, mask, turn, turn_gamma=gamma, lam=lam)
        want = reference_turn_wise(rewards, values, mask, turn, gamma, lam)
        np.testing.assert_allclose(out, want, atol=1e-9)


@pytest.mark.parametrize('group_size', [1, 2, 4])
@pytest.mark.parametrize('norm', NORMS)
@SETTINGS
@given(seed=st.integers(0, 2**31))
def test_group_comparisons_equal_float64_loops(norm, group_size, seed):
    rng = np.random.default_rng(seed)
    returns = rng.choice([0.0, 1.0, -0.3, 10.9, rng.normal()], 8)
    healthy = rng.random(8) < 0.7
    want = reference_group(returns, healthy, group_size, norm)
    function = functools.partial(adv.compare, group_size=group_size, norm=norm)
    with jax.enable_x64(True):
        out = function(jnp.asarray(returns), healthy)
    np.testing.assert_allclose(out, want, atol=1e-6)
    out = function(jnp.asarray(returns, jnp.float32), healthy)
    np.testing.assert_allclose(out, want, atol=1e-4)


def test_bi_level_gae_with_both_levels_merged_is_gae():
    rng = np.random.default_rng(2)
    mask, turn = episode_layout(rng, 5, 24, 4)
    placed = rec.place_on_turn_ends(rng.normal(size=(5, 4)).astype(np.float32), mask, turn)
    values = rng.normal(size=(5, 24)).astype(np.float32)
    inner = rng.normal(size=(5, 24)).astype(np.float32)  # like a KL term
    for rewards in (placed, placed + inner):
        both = bi_level_gae(rewards, values, mask, turn, gamma=1.0, turn_gamma=1.0, lam=1.0)
        plain = gae(rewards, values, mask, gamma=1.0, lam=1.0)
        np.testing.assert_allclose(both, plain, atol=1e-5)
    each = np.broadcast_to(np.arange(24, dtype=np.int32), (5, 24))  # each token is its own turn
    both = bi_level_gae(placed, values, mask, each, gamma=0.3, turn_gamma=0.9, lam=0.8)
    np.testing.assert_allclose(both, gae(placed, values, mask, gamma=0.9, lam=0.8), atol=1e-5)


@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_poison_outside_the_mask_changes_no_advantage(poison):
    rng = np.random.default_rng(4)
    mask, turn = episode_layout(rng, 4, 20, 3)
    rewards, values = rng.normal(size=(2, 4, 20)).astype(np.float32)

    def every(rewards, values):
        return (
            gae(rewards, values, mask, gamma=0.9, lam=0.8),
            turn_wise_gae(rewards, values, mask, turn, turn_gamma=0.9, lam=0.8),
            bi_level_gae(rewards, values, mask, turn, gamma=0.9, turn_gamma=0.8, lam=0.7),
            rec.whiten(rewards, mask),
        )

    dirty = every(np.where(mask, rewards, poison), np.where(mask, values, poison))
    for clean, out in zip(every(rewards, values), dirty, strict=True):
        np.testing.assert_array_equal(clean, out)


def test_overlong_penalty_by_hand():
    """Without a buffer, each token beyond the limit cost the full coefficient."""
    # limit 100, buffer 20: none up to 80, half at 90, the full penalty from 100
    lengths = jnp.array([10, 80, 90, 100, 110, 200])
    out = adv.overlong_penalty(lengths, max_length=100, buffer=20, coef=2.0)
    np.testing.assert_allclose(out, [0, 0, -1, -2, -2, -2])
    out = adv.overlong_penalty(jnp.array([99, 100, 101, 105]), max_length=100, buffer=0, coef=1.0)
    np.testing.assert_array_equal(out, [0, 0, -1, -1])
