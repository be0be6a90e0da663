"""Expert and random play against naive references and the specification's numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs import FrozenLake, reference, simulation
from agentrl_jax.envs.frozen_lake.levels import FROZEN, START, distance_to_goal, make_maps
from agentrl_jax.envs.frozen_lake.solver import MOVES, lake_plans, lake_values
from agentrl_jax.envs.frozen_lake.world import EnvParams
from agentrl_jax.envs.sokoban.levels import make_pool
from agentrl_jax.envs.sokoban.solver import solve_sokoban


def moved(fixed, boxes, player, action):
    """Move by Sokoban's rule, reimplemented on plain sets; None if nothing moves."""
    n = len(fixed)
    step = (-n, n, -1, 1)[action]
    floor = set(np.flatnonzero(fixed.reshape(-1) > 0).tolist())
    ahead, beyond = player + step, player + 2 * step
    if ahead not in floor or (ahead in boxes and (beyond not in floor or beyond in boxes)):
        return None
    return frozenset(boxes - {ahead} | {beyond}) if ahead in boxes else boxes, ahead


def as_mask(fixed, boxes):
    mask = np.zeros(fixed.size, bool)
    mask[list(boxes)] = True
    return mask.reshape(fixed.shape)


@pytest.mark.parametrize(
    'settings', [dict(search_depth=300), dict(dim=8, num_boxes=2, search_depth=8)]
)
def test_sokoban_solutions_are_valid_and_satisfy_bellmans_equation(settings):
    """length(s) = 1 + min over moves of length(s'), and 0 exactly if solved, so it is optimal."""
    pool = make_pool('train', 25, **settings)
    for fixed, mask, player, length in zip(*pool.values(), strict=True):
        boxes, player = frozenset(np.flatnonzero(mask.reshape(-1)).tolist()), int(player)
        targets = set(np.flatnonzero(fixed.reshape(-1) == 2).tolist())
        plan = solve_sokoban(fixed, mask, player)
        assert len(plan) == length
        for done, action in enumerate(plan):
            after = [moved(fixed, boxes, player, a) for a in range(4)]
            plans = [solve_sokoban(fixed, as_mask(fixed, s[0]), s[1]) for s in after if s]
            assert 1 + min(len(p) for p in plans if p is not None) == length - done
            boxes, player = after[action]
        assert boxes == targets


def test_a_box_in_a_corner_has_no_solution_and_a_solved_room_an_empty_one():
    fixed = np.array([[0] * 5, [0, 1, 1, 1, 0], [0, 1, 1, 2, 0], [0, 1, 1, 1, 0], [0] * 5])
    assert solve_sokoban(fixed, as_mask(fixed, {6}), 12) is None
    assert solve_sokoban(fixed, as_mask(fixed, {13}), 12) == ()
    assert solve_sokoban(fixed, as_mask(fixed, {12}), 11) == (3,)


def naive_values(transitions, tiles, horizon, play):
    """Compute finite-horizon values over gymnasium's dictionary P, cell by cell."""
    value = np.array([float(tile == 2) for tile in tiles])
    for _ in range(horizon):
        new = value.copy()
        for cell in range(len(tiles)):
            if tiles[cell] in (1, 2):
                continue
            q = [sum(t[0] * value[t[1]] for t in transitions[cell][a]) for a in range(4)]
            new[cell] = max(q) if play == 'best' else sum(q) / 4
        value = new
    return value


@pytest.mark.parametrize('play', ['best', 'random'])
@pytest.mark.parametrize('rate', [1 / 3, 0.8])
def test_lake_values_equal_dynamic_programming_on_gymnasiums_transitions(play, rate):
    gym_lake = pytest.importorskip('gymnasium.envs.toy_text.frozen_lake')
    boards = make_maps('train', 6, size=4, frozen=0.7, seed=0)
    values, actions = lake_values(boards, rate, 7, play=play)
    for index, board in enumerate(boards):
        rows = [''.join('FHGS'[tile] for tile in row) for row in board]
        transitions = gym_lake.FrozenLakeEnv(desc=rows, success_rate=rate).P
        for horizon in (0, 1, 7):
            expected = naive_values(transitions, board.reshape(-1), horizon, play)
            np.testing.assert_allclose(values[horizon, index], expected, atol=1e-12)
    assert actions.shape == values.shape


@pytest.mark.parametrize('left', [2, 10, 40])  # spare moves do not help
def test_without_slips_a_plan_is_a_prefix_of_a_shortest_path(left):
    boards = make_maps('train', 300, size=4, frozen=0.7, seed=1)
    start = (boards == START).reshape(300, -1).argmax(1)
    plans = lake_plans(boards, start, 1.0, np.full(300, left))
    distance = distance_to_goal(boards)
    np.testing.assert_array_equal([len(plan) for plan in plans], np.minimum(distance, left))
    cells = [np.array(divmod(cell, 4)) for cell in start]
    ends = np.array([cell + MOVES[plan].sum(0) for cell, plan in zip(cells, plans, strict=True)])
    after = boards.copy()
    after[boards == START] = FROZEN
    after[np.arange(300), *ends.T] = START
    away = distance > left
    np.testing.assert_array_equal(distance_to_goal(after)[away], (distance - left)[away])


@pytest.mark.parametrize('rate', [1 / 3, 0.8])
def test_with_slips_the_first_move_of_a_plan_is_optimal(rate):
    boards = make_maps('train', 300, size=4, frozen=0.7, seed=1)
    start = (boards == START).reshape(300, -1).argmax(1)
    values, _ = lake_values(boards, rate, 10)
    plans = lake_plans(boards, start, rate, np.full(300, 10))
    for cell, plan, value in zip(start, plans, values.swapaxes(0, 1), strict=True):
        quality = 0.0
        for turn, share in ((0, rate), (-1, (1 - rate) / 2), (1, (1 - rate) / 2)):
            moved = np.add(divmod(cell, 4), MOVES[(plan[0] + turn) % 4])
            row, column = np.clip(moved, 0, 3)
            quality += share * value[9, 4 * row + column]
        assert quality == pytest.approx(value[10, cell], abs=1e-5)


def published_maps(seeds, frozen, size=4):
    """Yield FrozenLake maps in RAGEN's order of random numbers (one generator per seed)."""
    seeding = pytest.importorskip('gymnasium.utils.seeding')
    boards = []
    for seed in seeds:
        rng, board = seeding.np_random(seed)[0], None
        while board is None or distance_to_goal(board[None])[0] < 0:
            tiles = rng.choice(['F', 'H'], (size, size), p=[frozen, 1 - frozen])
            start, goal = rng.integers(size, size=2), rng.integers(size, size=2)
            board = (tiles == 'H').astype(np.int8)
            board[tuple(start)], board[tuple(goal)] = 3, 2
        boards.append(board)
    return np.stack(boards)


def test_the_specifications_256_lakes_reproduce_its_numbers_exactly():
    """Table 3.5 (seeds 123 to 378): per cent at 5, 10, ..., 35 actions, to the last digit."""
    tables = {
        (0.8, 1 / 3, 'random'): [15.7, 21.2, 24.4, 26.4, 27.8, 28.8, 29.5],
        (0.9, 0.8, 'random'): [16.5, 24.3, 29.6, 33.5, 36.4, 38.7, 40.5],
        (0.8, 1 / 3, 'oracle'): [29.0, 48.3, 61.3, 69.8, 75.4, 79.3, 81.9],
    }
    at_ten = {(0.8, 0.8): 89.0, (0.9, 1 / 3): 55.1, (0.9, 0.8): 94.4, (0.9, 1.0): 100.0}
    env, maps = FrozenLake(), {p: published_maps(range(123, 379), p) for p in (0.8, 0.9)}

    def curves(frozen, rate, budgets):
        params = EnvParams(boards=jnp.asarray(maps[frozen]), success_rate=jnp.float32(rate))
        return reference.reference_curves(env, params, budgets)

    for (frozen, rate, player), expected in tables.items():
        got = 100 * curves(frozen, rate, range(5, 36, 5))[player]
        np.testing.assert_allclose(got, expected, atol=0.051)
    for (frozen, rate), expected in at_ten.items():
        assert 100 * curves(frozen, rate, [10])['oracle'][0] == pytest.approx(expected, abs=0.051)


@pytest.mark.soak
@pytest.mark.slow('plays thousands of levels')
@pytest.mark.parametrize('row', reference.ROWS, ids=lambda row: f'{row.player} {row.label}')
def test_reference_policies_on_our_levels_match_the_specification(row):
    """Within two standard errors of both samples (table 3.5)."""
    assert (reference.measure(row, levels=2048)['apart'] < 2).all()


def test_simulated_random_play_equals_the_exact_value():
    # Two estimates of one number: 64 lakes x 200 rollouts, s.e. at most 0.5 / sqrt(12800) = 0.0044.
    env = FrozenLake(success_rate=0.8)
    params = env.make_params('train', num_levels=64)
    won = simulation.simulate_random(env, params, 10, rollouts=200, seed=1)
    exact = reference.reference_success(env, params, 10)
    assert won.shape == (11, 64, 200) and not won[0].any()
    assert abs(won[10].mean() - exact['random']) < 0.0177
    twice = reference.reference_success(env, params, 10, trials=2)
    either = won[10, :, ::2] | won[10, :, 1::2]  # 6400 pairs: s.e. at most 0.00625
    assert abs(either.mean() - twice['random']) < 0.025 < twice['random'] - exact['random']
    assert (np.diff(won.astype(int), axis=0) >= 0).all()  # success is never lost
