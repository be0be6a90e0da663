"""Credit per turn: the paper's golden vector, every mode by hand or by loop, anchor groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.algorithms.mt_grpo import MTGRPO
from agentrl_jax.rl import turn_credit
from agentrl_jax.rl.algorithm import Comparison

SETTINGS = settings(max_examples=15, deadline=None)

# Four episodes of two turns: R_T in the first turn, separate R_O (from the paper's code)
R_TURN = jnp.array([[0.7, 0], [0.2, 0], [0, 0], [0.7, 0]])
R_OUT = jnp.array([1.9, 0.4, 1.9, 0.9])
A_OUT = [0.83322, -1.16651, 0.83322, -0.49993]
A_FIRST = [1.67591, -1.72830, -0.29037, 0.34276]
A_MERGED = [1.11411, -1.29477, 0.27100, -0.09033]
TWO, FOUR = jnp.full(4, 2), jnp.ones(4, bool)


def golden(mode, **kwargs):
    how = MTGRPO(mode=mode, **kwargs)
    return how.turn_advantages(R_TURN, R_OUT, TWO, FOUR, group_size=4)


@pytest.mark.parametrize(
    'mode, first, second',
    [
        ('mt_v1', A_FIRST, A_OUT),
        ('mt_cumulative', A_FIRST, A_OUT),
        ('mt_local', A_FIRST, A_OUT),
        ('flattened', A_FIRST, A_FIRST),
        ('or', A_OUT, A_OUT),
        ('mr', A_MERGED, A_MERGED),
    ],
)
def test_golden_vectors_of_two_turns(mode, first, second):
    np.testing.assert_allclose(golden(mode), np.stack([first, second], 1), atol=2e-5)


def test_coefficients_scale_their_terms():
    out = golden('mt_v1', turn_coef=0.5, outcome_coef=2.0)
    turn = np.array(A_FIRST) - A_OUT
    np.testing.assert_allclose(out[:, 0], 0.5 * turn + 2 * np.array(A_OUT), atol=5e-5)


def test_gtpo_and_hybrid_by_hand():
    # gamma .5, norm 'mean'.  row 0: three turns r = 1 2 4, o = 8; row 1: one turn r = 3, o = 6
    # to go, row 0: k=2: 4 + 8 = 12; k=1: 2 + .5 * 12 = 8; k=0: 1 + .5 * 8 = 5;  row 1: 9
    # centred: k=0: -2, 2; k=1 and 2: alone, 0
    r = jnp.array([[1.0, 2, 4], [3, 0, 0]])
    kwargs = dict(turn_gamma=0.5, comparison=Comparison('mean'))
    args = (r, jnp.array([8.0, 6]), jnp.array([3, 1]), jnp.ones(2, bool))
    togo = turn_credit.discounted_to_go(*args[:3], gamma=0.5)
    np.testing.assert_allclose(togo[0], [5, 8, 12])
    assert togo[1, 0] == 9
    out = MTGRPO(mode='gtpo', **kwargs).turn_advantages(*args, group_size=2)
    np.testing.assert_allclose(out, [[-2, 0, 0], [2, 0, 0]])
    how = MTGRPO(mode='hybrid', outcome_coef=0.3, **kwargs)
    out = how.turn_advantages(*args, group_size=2)
    # + .3 (+-1)
    np.testing.assert_allclose(out, [[-1.7, 0.3, 0.3], [1.7, 0, 0]], rtol=1e-6)


def test_turn_k_is_compared_only_among_episodes_that_reached_it():
    # three reach turn 1 with 1, 2, 6; the fourth ended before: a 0 for it would bias the mean
    r = jnp.array([[0, 1.0], [0, 2], [0, 6], [0, 0]])
    how = MTGRPO(mode='mt_local', comparison=Comparison('mean'))
    out = how.turn_advantages(r, jnp.zeros(4), jnp.array([2, 2, 2, 1]), FOUR, group_size=4)
    np.testing.assert_allclose(out, [[0, -2], [0, -1], [0, 3], [0, 0]])


def reference_norm(x, members):
    out = np.zeros(len(x))
    if len(members) > 1:
        values = np.array([x[i] for i in members])
        std = values.std(ddof=1)
        for i in members:
            out[i] = (x[i] - values.mean()) / (std + 1e-4) if std > 1e-9 else 0
    return out


def reference_turns(r, o, num_turns, healthy, mode, gamma, c, w):
    """Reference: loops over groups, turns and episodes."""
    group, turns = r.shape
    members = [i for i in range(group) if healthy[i]]
    at = [[i for i in members if num_turns[i] > k] for k in range(turns)]
    rewards = [[r[i, k] if k < num_turns[i] else 0.0 for k in range(turns)] for i in range(group)]
    local = np.array([reference_norm([p[k] for p in rewards], at[k]) for k in range(turns)]).T * c
    outcomes = reference_norm(o, members) * w
    merged = reference_norm([c * sum(rewards[i]) + w * o[i] for i in range(group)], members)

    def togo(i, k, a, b):
        rest = sum(gamma ** (j - k) * rewards[i][j] for j in range(k, num_turns[i]))
        return a * rest + b * gamma ** (num_turns[i] - 1 - k) * o[i]

    def future(a, b):
        columns = [
            reference_norm([togo(i, k, a, b) if i in at[k] else 0 for i in range(group)], at[k])
            for k in range(turns)
        ]
        return np.array(columns).T

    out = np.zeros((group, turns))
    for i, k in itertools.product(members, range(turns)):
        if k < num_turns[i]:
            out[i, k] = {
                'or': outcomes[i],
                'mr': merged[i],
                'mt_v1': outcomes[i] + (local[i, 0] if k == 0 else 0),
                'mt_cumulative': outcomes[i] + local[i, k:].sum(),
                'mt_local': outcomes[i] + local[i, k],
                'gtpo': future(c, w)[i, k],
                'hybrid': c * future(1, 1)[i, k] + outcomes[i],
                'flattened': outcomes[i] + local[i].sum(),
            }[mode]
    return out


@pytest.mark.parametrize('mode', turn_credit.MODES)
@SETTINGS
@given(seed=st.integers(0, 2**31), gamma=st.floats(0.5, 1.0))
def test_every_mode_equals_float64_loops(mode, seed, gamma):
    rng = np.random.default_rng(seed)
    r, o = rng.choice([0.0, 0.3, -1.0, rng.normal()], (8, 3)), rng.normal(size=8)
    num_turns, healthy = rng.integers(1, 4, 8), rng.random(8) < 0.8
    with jax.enable_x64(True):
        how = MTGRPO(mode=mode, turn_gamma=gamma, turn_coef=0.7, outcome_coef=1.3)
        out = how.turn_advantages(jnp.asarray(r), jnp.asarray(o), num_turns, healthy, group_size=4)
    for first in (0, 4):
        rows = slice(first, first + 4)
        want = reference_turns(
            r[rows], o[rows], num_turns[rows], healthy[rows], mode, gamma, 0.7, 1.3
        )
        np.testing.assert_allclose(out[rows], want, atol=1e-6)


# ---- anchors -----------------------------------------------------------------------------------


step_advantages = jax.jit(turn_credit.step_advantages, static_argnames=('group_size', 'norm'))


def test_step_advantages_by_hand():
    # group of two, anchors: row 0: a b, row 1: a c;  a: 1 and 3 -> -1, 1; b and c alone
    anchors = jnp.array([[7, 8], [7, 9]], jnp.uint32)
    returns, valid = jnp.array([[1.0, 5], [3, 6]]), jnp.ones((2, 2), bool)
    out = step_advantages(returns, anchors, valid, group_size=2)
    np.testing.assert_allclose(out, [[-1, 0], [1, 0]])
    out = step_advantages(returns, anchors, valid, group_size=2, norm='std')
    np.testing.assert_allclose(out, [[-(0.5**0.5), 0], [0.5**0.5, 0]], rtol=1e-5)
    # a state that occurs twice in an episode counts twice: a: 1, 5, 3 -> mean 3
    anchors = jnp.array([[7, 7], [7, 9]], jnp.uint32)
    out = step_advantages(returns, anchors, valid, group_size=2)
    np.testing.assert_allclose(out, [[-2, 2], [0, 0]])
    # unplayed turns and other groups are excluded
    valid = jnp.array([[True, True], [False, True]])
    out = step_advantages(returns, anchors, valid, group_size=2)
    np.testing.assert_allclose(out, [[-2, 2], [0, 0]])
    out = step_advantages(returns, anchors, valid, group_size=1)
    np.testing.assert_allclose(out, [[-2, 2], [0, 0]])
