"""RAE: both seats of a zero-sum game, with a baseline per seat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_rollouts as toy

from agentrl_jax.extras.self_play.rae import RAE, seat_returns

pytestmark = pytest.mark.soak


def seated(seed, learner=None, faulty=()):
    """Return a random rollout of games of up to five plies, with random seats."""
    rng = np.random.default_rng(seed)
    rollout = toy.random_rollout(seed, length=32, turns=5, faulty=faulty)
    seats = jnp.asarray(rng.integers(0, 2, rollout.rewards.shape), jnp.int32)
    penalties = jnp.asarray(-rng.random(rollout.rewards.shape), jnp.float32)
    extra = {'seats': seats} | ({} if learner is None else {'learner': learner})
    return rollout.replace(extra=extra, penalties=penalties)


def test_returns_of_both_seats_by_hand():
    """Rewards are zero-sum, penalties are not; the last turn was not played."""
    rewards = jnp.array([[0.0, 0.0, 3.0, 9.0]])
    penalties = jnp.array([[-0.1, 0.0, -0.5, -9.0]])
    seats = jnp.array([[0, 1, 1, 0]])
    got = seat_returns(rewards, penalties, seats, jnp.array([3]))
    np.testing.assert_allclose(got, [[2.9, -3.5]], atol=1e-6)


def expected_advantages(rollout, group_size, learner=None):
    """Reference with loops over episodes, turns and other members."""
    rewards, penalties, seats, turns = (
        np.asarray(x)
        for x in (rollout.rewards, rollout.penalties, rollout.extra['seats'], rollout.num_turns)
    )
    healthy = np.asarray(rollout.healthy)
    total = np.zeros((len(turns), 2))
    for b in range(len(turns)):
        for k in range(turns[b]):
            total[b] += rewards[b, k], -rewards[b, k]
            total[b, seats[b, k]] += penalties[b, k]
    advantages = np.zeros(rollout.tokens.shape)
    for b in range(len(turns)):
        group = range(b // group_size * group_size, (b // group_size + 1) * group_size)
        for t in np.flatnonzero(np.asarray(rollout.action_mask[b])):
            seat = seats[b, rollout.turn[b, t]]
            plays = [c for c in group if healthy[c] and (learner is None or learner[c] == seat)]
            others = [total[c, seat] for c in plays if c != b]
            if b in plays and others:
                advantages[b, t] = total[b, seat] - np.mean(others)
    return advantages


@pytest.mark.parametrize('faulty', [(), (2, 5)])
def test_a_seat_is_compared_with_the_same_seat_in_other_games(faulty):
    rollout = seated(0, faulty=faulty)
    batch = toy.batch_of(RAE(), rollout, 4, toy.scores_of(rollout))
    np.testing.assert_allclose(batch.advantages, expected_advantages(rollout, 4), atol=1e-5)


def test_against_snapshots_only_members_in_the_same_seat_are_compared():
    learner = jnp.arange(8, dtype=jnp.int32) % 2
    rollout = seated(1, learner=learner)
    learner_tokens = (
        jnp.take_along_axis(rollout.extra['seats'], jnp.maximum(rollout.turn, 0), 1)
        == learner[:, None]
    )
    rollout = rollout.replace(action_mask=rollout.action_mask & learner_tokens)
    batch = toy.batch_of(RAE(), rollout, 4, toy.scores_of(rollout))
    assert bool((batch.mask == rollout.action_mask).all())
    expected = expected_advantages(rollout, 4, np.asarray(learner))
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-5)


def test_the_value_of_moving_first_is_not_an_advantage():
    """A constant added to the rewards of seat 0 changes nothing."""
    rollout = seated(2)
    scores = toy.scores_of(rollout)
    more = rollout.replace(rewards=rollout.rewards.at[:, 0].add(2.0))
    one, other = (toy.batch_of(RAE(), x, 4, scores) for x in (rollout, more))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), one, other)
