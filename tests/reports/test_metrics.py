import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.measure.diversity import distinct_action_rate, repeated_ngrams
from agentrl_jax.measure.metrics import rollout_metrics
from agentrl_jax.types import EpisodeStop, TurnStop

GROUP_SIZE = 2
compute_metrics = jax.jit(rollout_metrics, static_argnums=1)


def make_rollout(**changes):
    """4 episodes (2 groups of 2), 8 positions, 2 turns, 1 action a turn.

    group 0: rewards (1, 0), (0, -0.5 with a penalty of -0.1); group 1: solved, and a faulty one.
    """
    rollout = toy.rollout_of(
        [[(1, 5)], [(1, 2), (1, 4)], [(1, 3)], [(1, 7)]],
        [[1, 0], [0, -0.5], [2, 0], [50, 0]],
        length=8,
        penalties=[[0, 0], [-0.1, 0], [0, 0], [0, 0]],
        faulty=(3,),
    )
    eos, cut = TurnStop.EOS, TurnStop.LENGTH
    fields = {
        'tokens': np.array(
            [
                [9, 5, 5, 5, 5, 5, 0, 0],
                [9, 1, 2, 9, 3, 4, 5, 6],
                [9, 1, 2, 3, 0, 0, 0, 0],
                [9, 7, 7, 7, 7, 7, 7, 7],
            ]
        ),
        'turn_stop': np.array([[eos, 0], [cut, eos], [eos, 0], [cut, 0]]),
        'valid': np.array([[1, 0], [0, 1], [1, 0], [0, 0]], bool),
        'num_actions': np.array([[1, 0], [0, 1], [1, 0], [1, 0]]),
        'actions': np.array([[[2], [-1]], [[-1], [3]], [[2], [-1]], [[0], [-1]]]),
        'episode_stop': rollout.episode_stop.at[1].set(EpisodeStop.TOKEN_BUDGET),
        'success': np.array([1, 0, 1, 1], bool),
        'level': np.array([0, 0, 1, 1]),
    }
    return rollout.replace(**jax.tree.map(jnp.asarray, fields | changes))


@pytest.fixture(scope='module')
def metrics():
    return compute_metrics(make_rollout(), GROUP_SIZE)


def test_metrics_of_a_rollout_by_hand(metrics):
    expected = {
        'rollout/success': 2 / 3,
        'rollout/return': (1 - 0.6 + 2) / 3,
        'rollout/turns': (1 + 2 + 1) / 3,
        'rollout/actions': 1.0,
        'rollout/tokens': (6 + 8 + 4) / 3,
        'rollout/response_length': (5 + 6 + 3) / 3,
        'rollout/valid_format': 3 / 4,  # of the turns (0,0), (1,0), (1,1), (2,0) only (1,0) fails
        'rollout/turn_length_stop': 1 / 4,
        'rollout/token_budget_stop': 1 / 3,
        'rollout/env_error': 1 / 4,
        'rollout/pass_at_n': 1.0,
        # Returns (1, -0.6): mean 0.2, std = sqrt(0.8^2 + 0.8^2); the other group has one healthy.
        'group/return_std': np.sqrt(1.28),
        'group/zero_std_frac': 0.0,
        'group/all_fail_frac': 0.0,
        'group/all_pass_frac': 1 / 2,
        # Episode 0: 5 5 5 5 5 has two 4-grams, one of them new; episode 1 has one within turn 1,
        # episode 2 none: (1/2 + 0) / 2.
        'echo/repeated_ngrams': 1 / 4,
        'echo/distinct_actions': 1.0,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
        assert metrics[name].dtype == jnp.float32 and metrics[name].shape == ()


def test_a_faulty_episode_changes_only_the_count_of_faults(metrics):
    poisoned = make_rollout(
        rewards=np.array([[1, 0], [0, -0.5], [2, 0], [np.nan, np.inf]], np.float32),
        success=np.array([1, 0, 1, 0], bool),
        actions=np.array([[[2], [-1]], [[-1], [3]], [[2], [-1]], [[2], [-1]]]),
    )
    for name, value in compute_metrics(poisoned, GROUP_SIZE).items():
        np.testing.assert_array_equal(value, metrics[name], err_msg=name)


def test_without_healthy_episodes_all_other_metrics_are_nan():
    """Previously a rollout in which all worlds failed had success 0 and varied groups."""
    rollout = make_rollout(episode_stop=np.full(4, EpisodeStop.ENV_ERROR))
    metrics = compute_metrics(rollout, GROUP_SIZE)
    assert metrics.pop('rollout/env_error') == 1
    assert all(np.isnan(value) for value in metrics.values())


def test_without_two_healthy_members_no_group_has_a_spread():
    stop = np.array([EpisodeStop.TERMINATED, EpisodeStop.ENV_ERROR] * 2)
    metrics = compute_metrics(make_rollout(episode_stop=stop), GROUP_SIZE)
    unknown = {name for name, value in metrics.items() if np.isnan(value)}
    assert unknown == {'group/return_std', 'group/zero_std_frac', 'echo/distinct_actions'}


def test_equal_returns_of_a_group_count_as_zero_std_despite_rounding():
    # 0.1 + 0.2 and 0.3 + 0 are the same outcome with different last bits.
    rollout = make_rollout(
        rewards=np.array([[0.1, 0.2], [0.3, 0], [2, 0], [1, 0]], np.float32),
        penalties=np.zeros((4, 2), np.float32),
        episode_stop=np.full(4, EpisodeStop.TERMINATED),
    )
    assert compute_metrics(rollout, GROUP_SIZE)['group/zero_std_frac'] == 0.5


def reference_repeated_ngrams(tokens, mask, turn, n):
    grams = [
        tuple(tokens[t : t + n])
        for t in range(len(tokens) - n + 1)
        if mask[t : t + n].all() and len(set(turn[t : t + n])) == 1
    ]
    return (1 - len(set(grams)) / len(grams) if grams else 0.0), len(grams)


@pytest.mark.parametrize('n', [1, 2, 4])
def test_repeated_ngrams_equal_a_double_loop(n):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (20, 60))
    mask = rng.random((20, 60)) < 0.9
    turn = np.sort(rng.integers(0, 4, (20, 60)), axis=1)
    repeated, count = jax.jit(lambda *x: repeated_ngrams(*x, n=n))(tokens, mask, turn)
    rows = zip(tokens, mask, turn, strict=True)
    expected = np.array([reference_repeated_ngrams(*row, n) for row in rows])
    np.testing.assert_allclose(repeated, expected[:, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(count, expected[:, 1])


def test_distinct_action_rate_by_hand():
    # Group 0: sequences 1, 1, 2 with the last one faulty: 1 of 2. Group 1: 1, 2, 3: 3 of 3.
    actions = jnp.array([1, 1, 2, 1, 2, 3])[:, None, None]
    healthy = jnp.array([1, 1, 0, 1, 1, 1], bool)
    rate, members = distinct_action_rate(actions, healthy, group_size=3)
    np.testing.assert_array_equal(rate, [0.5, 1.0])
    np.testing.assert_array_equal(members, [2, 3])
