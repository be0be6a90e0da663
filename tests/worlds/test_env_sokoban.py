"""Sokoban against gym-sokoban and by hand; its levels."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.envs.sokoban.levels import make_pool
from agentrl_jax.envs.sokoban.world import OTHER_SYMBOLS, EnvState, Sokoban

UP, DOWN, LEFT, RIGHT = range(4)


def room(*rows):
    """Build a state from a drawing in RAGEN's symbols."""
    codes = np.array([['#_O√XPS'.index(sign) for sign in row] for row in rows])
    fixed = np.where(np.isin(codes, (2, 3, 6)), 2, np.minimum(codes, 1)).astype(np.int8)
    return EnvState(
        time=jnp.int32(0),
        fixed=jnp.asarray(fixed),
        boxes=jnp.asarray(np.isin(codes, (3, 4))),
        player=jnp.int32(np.flatnonzero(np.isin(codes, (5, 6)))[0]),
    )


def play(env, state, actions):
    """Return [(reward, text, effective, over)] of the actions."""
    step, outcomes = jax.jit(env.step_env), []
    for action in actions:
        _, state, reward, over, info = step(jax.random.key(0), state, action, None)
        text = env.observation_text(state)
        outcomes.append((round(float(reward), 4), text, bool(info['effective']), bool(over)))
    return outcomes


def test_an_episode_by_hand():
    env = Sokoban(dim=6)
    start = room('######', '#P_#_#', '#_X_O#', '#____#', '#____#', '######')
    outcomes = play(env, start, [UP, DOWN, RIGHT, RIGHT, UP])
    # -0.1 a step; the wall above stops the player; the last push is -0.1 + 1 + 10 = 10.9.
    assert [reward for reward, *_ in outcomes] == [-0.1, -0.1, -0.1, 10.9, 0.0]
    assert [effective for _, _, effective, _ in outcomes] == [False, True, True, True, False]
    assert [over for *_, over in outcomes] == [False, False, False, True, True]
    assert outcomes[2][1] == '######\n#__#_#\n#_PXO#\n#____#\n#____#\n######\n'
    assert outcomes[3][1] == '######\n#__#_#\n#__P√#\n#____#\n#____#\n######\n'


def test_pushing_a_box_off_its_target_costs_one_but_between_targets_nothing():
    env = Sokoban(dim=6, num_boxes=2)
    start = room('######', '#P√O_#', '#____#', '#X___#', '#____#', '######')
    outcomes = play(env, start, [RIGHT, RIGHT])
    assert [reward for reward, *_ in outcomes] == [-0.1, -1.1]
    assert outcomes[0][1].splitlines()[1] == '#_S√_#'  # the player is on the first target
    assert outcomes[1][1].splitlines()[1] == '#_OSX#'


def test_blocked_pushes_move_nothing():
    env = Sokoban(dim=6, num_boxes=2)
    two = room('######', '#PXXO#', '#___O#', '#____#', '#____#', '######')
    wall = room('######', '#X___#', '#P__O#', '#___O#', '#X___#', '######')
    for start, action in ((two, RIGHT), (wall, UP)):
        ((reward, text, effective, over),) = play(env, start, [action])
        assert (reward, effective, over) == (-0.1, False, False)
        assert text == env.observation_text(start)


def test_other_symbols_and_coordinates_by_hand():
    state = room('######', '#P_#_#', '#_X_O#', '#____#', '#____#', '######')
    assert Sokoban(symbols=OTHER_SYMBOLS).observation_text(state).splitlines()[:3] == [
        'WWWWWW',
        'WA.W.W',
        'W.B.GW',
    ]
    text = Sokoban(observation_format='cells').observation_text(state)
    assert text.startswith(' # # # # # #\n # P _ # _ #\n # _ X _ O #\n')
    text = Sokoban(observation_format='coord').observation_text(state)
    assert text == (
        'Board size: 6 rows x 6 cols (zero-indexed).\nTargets: (2, 4)\nBoxes: (2, 2)\n'
        'Player: (1, 1)\n'
    )
    on = room('######', '#P_#_#', '#_X_O#', '#_√__#', '#____#', '######')
    text = Sokoban(num_boxes=2, observation_format='grid_coord').observation_text(on)
    assert text.startswith('Coordinates: \nBoard size: 6 rows')
    assert 'Targets: (2, 4), (3, 2)\nBoxes: (2, 2)\nBoxes on target: (3, 2)\nPlayer' in text
    assert Sokoban().cells(on)[3] == ['wall', 'empty', 'box on target', 'empty', 'empty', 'wall']


def gym_sokoban(dim, num_boxes, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        module = pytest.importorskip('gym_sokoban.envs.sokoban_env')
    monkeypatch.setattr(module.SokobanEnv, 'get_image', lambda *args, **kwargs: None)
    return module.SokobanEnv(
        dim_room=(dim, dim), max_steps=10_000, num_boxes=num_boxes, reset=False
    )


@pytest.mark.parametrize('dim, num_boxes', [(6, 1), (8, 2), (7, 3)])
def test_dynamics_and_rewards_equal_gym_sokobans_on_random_play(dim, num_boxes, monkeypatch):
    theirs = gym_sokoban(dim, num_boxes, monkeypatch)
    env, levels, steps = Sokoban(dim=dim, num_boxes=num_boxes, search_depth=12), 60, 80
    params = env.make_params('train', num_levels=levels)
    states = jax.vmap(env.reset_level, in_axes=(0, None))(jnp.arange(levels), params)
    actions = np.random.default_rng(0).integers(4, size=(steps, levels))

    def act(states, action):
        step = jax.vmap(lambda s, a: env.step_env(None, s, a, params))
        cells, states, reward, over, info = step(states, action)
        return states, (cells, reward, over, info['effective'])

    ours = jax.jit(lambda s: jax.lax.scan(act, s, jnp.asarray(actions)))(states)[1]
    cells, reward, over, effective = map(np.asarray, ours)
    finished = 0
    for level in range(levels):
        fixed, boxes = np.array(params.fixed[level], int), np.asarray(params.boxes[level])
        theirs.room_fixed, theirs.room_state = fixed, np.where(boxes, 4, fixed)
        theirs.player_position = np.array(divmod(int(params.player[level]), dim))
        theirs.room_state[tuple(theirs.player_position)] = 5
        theirs.num_env_steps = theirs.boxes_on_target = 0
        for t in range(steps):
            before = theirs.player_position.copy()
            _, their_reward, done, _ = theirs.step(int(actions[t, level]) + 1)
            picture = np.where(cells[t, level] == 6, 5, cells[t, level])
            np.testing.assert_array_equal(picture, theirs.room_state)
            assert reward[t, level] == pytest.approx(their_reward, abs=1e-5)
            assert over[t, level] == done
            assert effective[t, level] == (before != theirs.player_position).any()
            if done:
                finished += 1
                break
    assert finished > 0


@pytest.mark.parametrize(
    'settings', [{}, dict(search_depth=30), dict(dim=8, num_boxes=2, search_depth=10)]
)
def test_pool_levels_are_unsolved_walled_and_have_one_target_per_box(settings):
    fixed, boxes, player, lengths = make_pool('train', 150, **settings).values()
    dim, num_boxes = fixed.shape[1], boxes.reshape(150, -1).sum(1)
    flat = fixed.reshape(150, -1)
    assert (num_boxes == (flat == 2).sum(1)).all() and len(set(num_boxes.tolist())) == 1
    assert not (boxes & (fixed != 1)).any()  # every box on plain floor
    at_player = flat[np.arange(150), player]
    assert (at_player != 0).all() and not boxes.reshape(150, -1)[np.arange(150), player].any()
    border = np.ones((dim, dim), bool)
    border[1:-1, 1:-1] = False
    assert (fixed[:, border] == 0).all() and (lengths > 0).all()


def test_optimal_lengths_are_distributed_as_in_the_reference_generator():
    # specs: 300 boards of RAGEN's generator, lengths 1.. : 26 75 38 46 46 35 9 16 6 2 1, mean 3.97.
    theirs = np.array([26, 75, 38, 46, 46, 35, 9, 16, 6, 2, 1]) / 300
    lengths = make_pool(None, 3000, unique=False)['optimal_length']
    ours = np.bincount(lengths, minlength=20)[1:12] / 3000
    # Total variation; two halves of 2000 boards of the reference differ by 0.054 (95 %: 0.076).
    assert 0.5 * np.abs(ours - theirs).sum() < 0.1
    # s.e. of their mean is 2.2 / sqrt(300) = 0.13
    assert abs(lengths.mean() - 3.97) < 0.26
