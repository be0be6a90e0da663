"""What the best player still earns: against all plays, Bellman's equation and the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs import FrozenLake, Sokoban, simulation
from agentrl_jax.envs.borrowed.minesweeper import Minesweeper
from agentrl_jax.envs.frozen_lake.levels import GOAL, HOLE
from agentrl_jax.envs.frozen_lake.world import EnvParams
from agentrl_jax.envs.library.levels import EMPTY, PEOPLE
from agentrl_jax.envs.library.world import Library
from agentrl_jax.envs.sokoban.solver import solve_sokoban

LAKE = np.array([['SFH', 'FFF', 'HFG'], ['FHF', 'SFF', 'FFG']])
KEY = jax.random.key(0)


def lakes(rate):
    boards = np.array([['FHGS'.index(tile) for row in rows for tile in row] for rows in LAKE])
    boards = jnp.asarray(boards.reshape(2, 3, 3), jnp.int8)
    return FrozenLake(size=3), EnvParams(boards=boards, success_rate=jnp.float32(rate))


def best_chance(tiles, cell, rate, left):
    """Every action and every slip, one after another."""
    if tiles[cell] in (GOAL, HOLE) or left == 0:
        return 0.0
    found = []
    for action in range(4):
        total = 0.0
        for turn, share in ((0, rate), (-1, (1 - rate) / 2), (1, (1 - rate) / 2)):
            row, column = divmod(cell, 3)
            step = ((0, -1), (1, 0), (0, 1), (-1, 0))[(action + turn) % 4]
            after = 3 * min(max(row + step[0], 0), 2) + min(max(column + step[1], 0), 2)
            won = float(tiles[after] == GOAL)
            total += share * (won + best_chance(tiles, after, rate, left - 1))
        found.append(total)
    return max(found)


@pytest.mark.parametrize('rate', [1.0, 0.8, 1 / 3])
def test_values_of_a_lake_are_the_best_of_all_plays(rate):
    env, params = lakes(rate)
    values = jax.jit(jax.vmap(env.optimal_value, (0, None, None)))
    for level in range(2):
        cells = jnp.arange(9)
        start = env.reset_level(level, params)
        states = jax.vmap(lambda cell, start=start: start.replace(position=cell))(cells)
        tiles = np.asarray(params.boards[level]).reshape(-1)
        for left in range(4):
            expected = [best_chance(tiles, cell, rate, left) for cell in range(9)]
            np.testing.assert_allclose(values(states, left, params), expected, atol=1e-6)
    assert max(expected) > 0.3


@pytest.mark.parametrize('rate', [1.0, 0.8])
def test_no_action_gains_on_the_lake_and_the_best_one_loses_nothing(rate):
    """E[r + V(s')] - V(s) is at most 0, and 0 for one action of each state."""
    env, params = FrozenLake(success_rate=rate), None
    params = env.make_params('train', num_levels=16)
    sure = params.replace(success_rate=jnp.float32(1.0))
    value, cells, left = env.optimal_value, jnp.arange(16), 6

    def gain(level, cell, action):
        state = env.reset_level(level, params).replace(position=cell)

        def led_to(move):
            _, after, reward, _, _ = env.step_env(KEY, state, move % 4, sure)
            return reward + value(after, left - 1, params)

        slips = (led_to(action - 1) + led_to(action + 1)) * (1 - rate) / 2
        gained = rate * led_to(action) + slips - value(state, left, params)
        return jnp.where(env.is_terminated(state, params), 0.0, gained)

    every = jax.vmap(jax.vmap(jax.vmap(gain, (None, None, 0)), (None, 0, None)), (0, None, None))
    gained = np.asarray(jax.jit(every)(jnp.arange(16), cells, jnp.arange(4)))
    assert gained.max() < 1e-6 and gained.min() < -0.2
    np.testing.assert_allclose(gained.max(2), 0.0, atol=1e-6)


def test_the_value_of_a_start_is_what_the_oracle_earns_over_many_plays():
    env, plays = FrozenLake(success_rate=0.8), 300
    pool = env.make_params('train', num_levels=4, seed=2)
    many = pool.replace(boards=jnp.repeat(pool.boards, plays, axis=0))
    _, rewards = simulation.episodes(env, many, np.arange(4 * plays), 6, plans=4 * plays)
    earned = rewards.sum(0).reshape(4, plays).mean(1)
    start = jax.vmap(env.reset_level, (0, None))(jnp.arange(4), pool)
    values = np.asarray(jax.vmap(env.optimal_value, (0, None, None))(start, 6, pool))
    error = np.sqrt(np.maximum(values * (1 - values), 1e-9) / plays)
    assert (np.abs(earned - values) < 4 * error + 1e-9).all() and 0.1 < values.min() < 0.95


def library_states(env, params):
    """A start, one with a card seen, one with the answer's card seen, one that ended."""
    start = env.reset_level(0, params)
    cards = np.asarray(start.cards)
    other = int(np.flatnonzero((cards != EMPTY) & (cards != len(PEOPLE) + int(start.answer)))[0])
    found = int(np.flatnonzero(cards == len(PEOPLE) + int(start.answer))[0])

    def seen(who):
        return start.replace(seen=start.seen.at[who].set(True), lookups=jnp.int32(3))

    return [start, seen(other), seen(found), start.replace(named=jnp.int32(1))]


@pytest.mark.parametrize('cost', [0.0, 0.1])
def test_values_of_the_library_are_the_best_of_all_plays(cost):
    """Of all lists of three actions: nothing is left to chance."""
    env = Library(cards=3, min_hops=2, max_hops=2, side=2, lookup_cost=cost)
    params = env.make_params('train', num_levels=4)
    plays = jnp.asarray(list(itertools.product(range(env.num_actions), repeat=3)), jnp.int32)

    def earned(state, actions):
        def act(state, action):
            _, state, reward, _, _ = env.step_env(KEY, state, action, params)
            return state, reward

        return jnp.cumsum(jax.lax.scan(act, state, actions)[1])

    sums = jax.jit(lambda state: jax.vmap(earned, (None, 0))(state, plays).max(0))
    found = []
    for state in library_states(env, params):
        values = [float(env.optimal_value(state, left, params)) for left in range(4)]
        best = np.maximum.accumulate([0.0, *np.asarray(sums(state))])
        np.testing.assert_allclose(values, best, atol=1e-6)
        found.append(values[3])
    assert found[0] >= found[1] > found[2] > found[3] == 0


def test_values_of_a_room_are_those_of_its_shortest_solution():
    """Of starts and of the states that random moves lead to, some of them stuck."""
    env = Sokoban(dim=6)
    params = env.make_params('train', num_levels=12, seed=4)
    walk = jax.random.randint(KEY, (12, 40), 0, 4)

    def states(level, actions):
        def act(state, action):
            return env.step_env(KEY, state, action, params)[1], state

        return jax.lax.scan(act, env.reset_level(level, params), actions)[1]

    met = jax.jit(jax.vmap(states))(jnp.arange(12), walk)
    met = jax.tree.map(lambda x: x[:, ::5].reshape(-1, *x.shape[2:]), met)
    values = jax.jit(jax.vmap(env.optimal_value, (0, None, None)))
    stuck = 0
    for left in (0, 1, 6, 15):
        expected = []
        for fixed, boxes, player in zip(met.fixed, met.boxes, met.player, strict=True):
            path = solve_sokoban(fixed, boxes, player)
            stuck += path is None
            fits = path is not None and 0 < len(path) <= left
            expected.append(0.0 if path == () else 11 - 0.1 * len(path) if fits else -0.1 * left)
        np.testing.assert_allclose(values(met, left, params), expected, atol=1e-5)
    assert stuck and max(expected) > 10
    assert not Sokoban(num_boxes=2).values_known


def test_no_move_gains_in_a_room_and_the_best_one_loses_nothing():
    env, left = Sokoban(dim=6), 7
    params = env.make_params('train', num_levels=16, seed=5)

    def gain(level, action):
        state = env.reset_level(level, params)
        _, after, reward, _, _ = env.step_env(KEY, state, action, params)
        later = env.optimal_value(after, left - 1, params)
        return reward + later - env.optimal_value(state, left, params)

    every = jax.vmap(jax.vmap(gain, (None, 0)), (0, None))
    gained = np.asarray(jax.jit(every)(jnp.arange(16), jnp.arange(4)))
    np.testing.assert_allclose(gained.max(1), 0.0, atol=1e-5)
    assert gained.min() < -5  # a solution that is then too long


def fewest_openings(env, state):
    """Breadth first over cells that hide no mine, by the rules of the world itself."""
    mines = np.asarray(state.game[0])
    turn = jax.jit(lambda opened, cell: env.turn(KEY, (state.game[0], opened), cell)[0][1])
    seen, level, actions = {np.asarray(state.game[1]).tobytes()}, [state.game[1]], 0
    while not any((np.asarray(opened) | mines).all() for opened in level):
        level = [
            turn(opened, cell) for opened in level for cell in np.flatnonzero(~mines & ~opened)
        ]
        level = list({np.asarray(x).tobytes(): x for x in level}.values())
        level = [x for x in level if np.asarray(x).tobytes() not in seen]
        seen |= {np.asarray(x).tobytes() for x in level}
        actions += 1
    return actions


@pytest.mark.parametrize('mines', [2, 3, 6])
def test_values_of_a_minefield_are_those_of_the_fewest_openings(mines):
    env = Minesweeper(mines=mines)
    params = env.make_params('train', num_levels=6, seed=mines)
    for level in range(6):
        state = env.reset_level(level, params)
        needed = fewest_openings(env, state)
        values = [float(env.optimal_value(state, left, params)) for left in range(17)]
        assert values == [float(left >= needed > 0) for left in range(17)]
        lost = state.replace(game=(state.game[0], state.game[1] | state.game[0]))
        assert env.optimal_value(lost, 16, params) == 0
