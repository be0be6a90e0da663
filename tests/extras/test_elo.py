"""Elo ratings: known strengths, players that never lose, and seats."""

import importlib.util

import jax
import numpy as np
import pytest

from agentrl_jax.extras.self_play import ratings

pytestmark = pytest.mark.soak

STRENGTHS = np.array([0.0, 200, -100, 500])


def scores(deals, rng):
    """Simulate games with these strengths and some draws; float [4, 4, deals, 2]."""
    players = len(STRENGTHS)
    points = np.full((players, players, deals, 2), np.nan)
    for i in range(players):
        for j in range(i):
            win = 1 / (1 + 10 ** ((STRENGTHS[j] - STRENGTHS[i]) / 400))
            draw, uniform = min(win, 1 - win) / 2, rng.random((deals, 2))
            one = np.where(uniform < draw, 0.5, uniform < draw / 2 + win)  # of mean `win`
            points[i, j], points[j, i] = one, 1 - one[:, ::-1]
    return points


def test_known_strengths_are_recovered_within_their_intervals():
    rating, low, high = ratings.intervals(scores(1500, np.random.default_rng(0)), resamples=300)
    np.testing.assert_allclose(rating, STRENGTHS, atol=40)
    assert rating[0] == low[0] == high[0] == 0
    assert (low[1:] < STRENGTHS[1:]).all() and (STRENGTHS[1:] < high[1:]).all()
    assert (high - low)[1:].max() < 80


def test_two_players_by_hand():
    """25 of 32 points plus one draw with the anchor: odds of 25.5 to 7.5."""
    points = np.array([[0, 7.0], [25.0, 0]])
    rating = ratings.fit(points, np.array([[0, 32.0], [32.0, 0]]))
    np.testing.assert_allclose(rating, [0, 400 * np.log10(25.5 / 7.5)], atol=1e-6)


def test_a_player_that_wins_every_game_has_a_finite_rating():
    """Ten wins and a draw: odds of 10.5 to 0.5."""
    rating = ratings.fit(np.array([[0, 0.0], [10.0, 0]]), np.array([[0, 10.0], [10.0, 0]]))
    np.testing.assert_allclose(rating, [0, 400 * np.log10(21)], atol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec('pgx') is None, reason='pip install pgx')
def test_the_connect_four_expert_beats_random_play_from_both_seats():
    """Each deal is played from both seats, and the game is zero-sum."""
    from agentrl_jax.extras.games.connect_four import ConnectFour
    from agentrl_jax.extras.self_play import elo

    world = ConnectFour(True, 'self')
    game = elo.Game(world, world.make_params('test', num_levels=16), most=42)
    expert, chance = elo.expert(game), elo.at_random(game)
    wins = elo.play(game, expert, chance, 16, seed=0)
    losses = elo.play(game, chance, expert, 16, seed=1)
    assert wins.shape == (2, 16) and (wins.mean(1) > 0.8).all() and (losses.mean(1) < -0.8).all()
    states = jax.device_get(game.programs[0](np.arange(16)))
    assert (expert.chances(states, 0).sum(1) == 1).all()
