"""FrozenLake against gymnasium and by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs import FrozenLake
from agentrl_jax.envs.frozen_lake.levels import GOAL, HOLE, START, distance_to_goal, make_maps
from agentrl_jax.envs.frozen_lake.world import EnvParams

LEFT, DOWN, RIGHT, UP = range(4)


def lake(*rows, success_rate=1.0):
    """Return (environment, parameters) of one map: S start, G goal, H hole."""
    board = np.array([['FHGS'.index(tile) for tile in row] for row in rows], np.int8)
    params = EnvParams(boards=jnp.asarray(board[None]), success_rate=jnp.float32(success_rate))
    return FrozenLake(size=len(rows)), params


def letters(board):
    return [''.join('FHGS'[tile] for tile in row) for row in board]


@pytest.mark.parametrize('size', [4, pytest.param(6, marks=pytest.mark.soak)])
def test_transition_probabilities_equal_gymnasiums(monkeypatch, size):
    """The only uniform number of a step sweeps a fine grid, so frequencies are exact."""
    gym_lake = pytest.importorskip('gymnasium.envs.toy_text.frozen_lake')
    grid = (jnp.arange(3000) + 0.5) / 3000
    monkeypatch.setattr(jax.random, 'uniform', lambda key: key)
    env = FrozenLake(size=size)
    cells = jnp.arange(size * size)

    def transitions(params, position, action):
        state = env.reset_level(0, params).replace(position=position)
        _, after, reward, over, _ = jax.vmap(lambda u: env.step_env(u, state, action, params))(grid)
        share = jnp.mean(jax.nn.one_hot(after.position, size * size), axis=0)
        # Reward and end depend on the reached cell; keep one example of each.
        witness = jnp.zeros(size * size).at[after.position]
        return share, witness.max(reward), witness.max(over.astype(float))

    sweep = jax.jit(jax.vmap(jax.vmap(transitions, (None, None, 0)), (None, 0, None)))
    boards = make_maps('train', 4, size=size, frozen=0.7, seed=3)
    for board, success_rate in itertools.product(boards, (1 / 3, 0.8, 1.0)):
        params = EnvParams(boards=jnp.asarray(board[None]), success_rate=jnp.float32(success_rate))
        share, reward, over = (np.asarray(x) for x in sweep(params, cells, jnp.arange(4)))
        theirs = gym_lake.FrozenLakeEnv(desc=letters(board), success_rate=success_rate).P
        for cell in range(size * size):
            for action in range(4):
                expected = np.zeros(size * size)
                for probability, after, gain, ends in theirs[cell][action]:
                    expected[after] += probability
                    if probability > 0:
                        assert reward[cell, action, after] == gain
                        assert over[cell, action, after] == ends
                np.testing.assert_allclose(share[cell, action], expected, atol=1.1e-3)


def test_an_episode_by_hand():
    env, params = lake('SHF', 'FFF', 'FFG')
    state = env.reset_level(0, params)
    key = jax.random.key(0)
    assert env.observation_text(state) == 'PO_\n___\n__G\n'
    _, state, reward, over, info = env.step_env(key, state, LEFT, params)  # into the edge
    assert (int(state.position), float(reward), bool(over)) == (0, 0.0, False)
    assert not bool(info['effective']) and int(state.time) == 1
    _, state, *_ = env.step_env(key, state, DOWN, params)
    assert env.observation_text(state) == '_O_\nP__\n__G\n'  # the start is hidden
    assert env.cells(state)[1] == ['player', 'empty', 'empty']
    for action, cell in ((RIGHT, 4), (RIGHT, 5), (DOWN, 8)):
        _, state, reward, over, info = env.step_env(key, state, action, params)
        assert int(state.position) == cell
    assert float(reward) == 1.0 and bool(over) and bool(info['success'])
    assert env.observation_text(state) == '_O_\n___\n__√\n'


def test_coordinates_by_hand():
    _, params = lake('SHF', 'FFH', 'FFG')
    env = FrozenLake(size=3, observation_format='grid_coord')
    state = env.reset_level(0, params)
    assert env.observation_text(state) == (
        'Coordinates: \nBoard size: 3 rows x 3 cols (zero-indexed).\nStart: (0, 0)\nGoal: (2, 2)\n'
        'Player: (0, 0)\nHoles: (0, 1), (1, 2)\nGrid Map: \nPO_\n__O\n__G\n'
    )
    _, state, reward, over, info = env.step_env(jax.random.key(0), state, RIGHT, params)
    text = env.observation_text(state)
    assert 'Player in hole: (0, 1)\n' in text and text.endswith('_X_\n__O\n__G\n')
    assert float(reward) == 0.0 and bool(over) and not bool(info['success'])


def test_cells_by_hand():
    _, params = lake('SHF', 'FFH', 'FFG')
    env = FrozenLake(size=3, observation_format='cells')
    state = env.reset_level(0, params)
    assert env.observation_text(state) == ' P O _\n _ _ O\n _ _ G\n'
    assert env.instruction == FrozenLake(size=3).instruction
    assert len(env.lines()) == len(FrozenLake(size=3).lines())


def test_maps_are_solvable_and_their_distance_is_right():
    boards = make_maps('train', 200, size=5, frozen=0.65, seed=2)
    for board, distance in zip(boards, distance_to_goal(boards), strict=True):
        assert (board == START).sum() == 1 == (board == GOAL).sum()
        assert distance == walk_length(board) > 0


def walk_length(board):
    """Return the path length by breadth-first search; None without a path."""
    size = len(board)
    frontier = {tuple(np.argwhere(board == START)[0])}
    visited, moves = set(frontier), 0
    while frontier:
        if any(board[cell] == GOAL for cell in frontier):
            return moves
        near = {(r + a, c + b) for r, c in frontier for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        near = {(r, c) for r, c in near if 0 <= r < size and 0 <= c < size}
        frontier = {cell for cell in near - visited if board[cell] != HOLE}
        visited |= frontier
        moves += 1
    return None


def test_cells_freeze_with_the_stated_probability():
    # Rejecting unsolvable maps favours ice slightly, by less than 0.02 with frozen = 0.9.
    boards = make_maps(None, 2000, size=8, frozen=0.9, seed=0, unique=False)
    assert 0.895 < 1 - (boards == HOLE).mean() * 64 / 62 < 0.92
