"""BabyAI: minigrid replays, rules by hand, AgentGym's wrapper, the expert, pools and texts."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import re
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agentgym_babyai import Wrapper

from agentrl_jax.envs import BabyAI
from agentrl_jax.envs.babyai import pool, sight, texts
from agentrl_jax.envs.babyai.export import (
    empty_levels,
    export_levels,
    first_state,
    gym_id,
    level_maker,
)
from agentrl_jax.envs.babyai.planner import plan
from agentrl_jax.envs.babyai.rules import DROP, FORWARD, LEFT, PICKUP, RIGHT, TOGGLE
from agentrl_jax.envs.babyai.words import (
    AFTER,
    BEFORE,
    COLOURS,
    DESCRIPTIONS,
    GO_TO,
    KINDS,
    OPEN_DOOR,
    PICK_UP,
    PUT_NEXT,
    SIDE,
    SINGLE,
    mission,
    phrase,
)
from agentrl_jax.envs.babyai.world import EnvParams, device_arrays
from agentrl_jax.envs.hosts import babyai as served
from agentrl_jax.envs.hosts import workers

needs_minigrid = pytest.mark.skipif(
    importlib.util.find_spec('minigrid') is None, reason='pip install -r requirements-test.txt'
)
AGENTGYM = BabyAI(actions='macro', wording='agentgym', agentgym_rewards=True, most_seen=18)


# ---- against minigrid --------------------------------------------------------------------------


WEIGHTS = (0.17, 0.17, 0.34, 0.12, 0.1, 0.1)  # of random actions: left, right, forward, ...
FIELDS = ('image', 'cell', 'direction', 'held', 'reward', 'terminated', 'truncated')


def minigrid_play(data_idx, rng):
    """Return (actions, FIELDS after each); a third of the players are random, a third experts."""
    seed, index = divmod(int(data_idx), len(pool.LEVELS))
    env = level_maker(pool.LEVELS[index])(seed)
    best = plan(first_state({k: v[seed] for k, v in pool.block(pool.LEVELS[index], 0).items()}))
    actions = rng.choice(6, size=env.max_steps if index % 8 == 0 else 150, p=WEIGHTS)
    best = np.array(best[: len(actions)], int)
    follows = rng.random(len(best)) < (0.0, 1.0, 0.93)[index % 3]
    actions[: len(best)] = np.where(follows, best, actions[: len(best)])
    rows = []
    for action in actions:
        obs, *ends, _ = env.step(int(action))
        x, y = map(int, env.agent_pos)
        held = env.carrying
        name = -1 if held is None else KINDS.index(held.type) * 6 + COLOURS.index(held.color)
        rows.append((obs['image'], y * SIDE + x, env.agent_dir, name, *ends))
        if ends[1] or ends[2]:
            break
    return actions[: len(rows)], rows


@needs_minigrid
def test_play_of_all_forty_levels_matches_minigrid():
    """Compare view, pose, carrying, reward and both ends after every step, on each level."""
    env, rng = BabyAI(), np.random.default_rng(0)
    params = env.make_params(None, num_levels=len(pool.LEVELS))
    games = [minigrid_play(data_idx, rng) for data_idx in np.asarray(params.data_idx)]
    actions = np.full((max(len(actions) for actions, _ in games), len(games)), -1, np.int32)
    for row, (moves, _) in enumerate(games):
        actions[: len(moves), row] = moves

    def step(states, action):
        one = jax.vmap(env.step_env, (None, 0, 0, None))
        image, states, reward, terminated, _ = one(jax.random.key(0), states, action, params)
        held = jnp.take_along_axis(states.name, jnp.maximum(states.held, 0)[:, None], 1)[:, 0]
        held = jnp.where(states.held < 0, -1, held)
        truncated = jax.vmap(env.is_truncated, (0, None))(states, params)
        pose = states.agent, states.direction
        return states, (image, *pose, held, reward, terminated, truncated)

    @jax.jit
    def run(actions):
        states = jax.vmap(env.reset_level, (0, None))(jnp.arange(len(games)), params)
        return jax.lax.scan(step, states, actions)[1]

    ours = jax.device_get(run(actions))
    for row, (_, rows) in enumerate(games):
        for name, theirs, mine in zip(FIELDS, zip(*rows, strict=True), ours, strict=True):
            mine = mine[: len(rows), row]
            np.testing.assert_allclose(mine, theirs, atol=1e-6, err_msg=f'level {row}: {name}')
    rewards, truncated = ([rows[-1][i] for _, rows in games] for i in (4, 6))
    assert sum(map(bool, rewards)) >= 24 and any(truncated)  # fewer if the expert finds no plan
    assert sum(len(rows) for _, rows in games) > 1500


@needs_minigrid
def test_missions_and_the_level_file_match_minigrid():
    """export_levels itself rejects a mission that differs from minigrid's."""
    for name in ('PickupDistDebug', 'SynthSeq', 'PutNextS7N4Carrying', 'KeyInBox'):
        fresh, stored = export_levels(name, range(3)), pool.block(name, 0)
        for key, values in fresh.items():
            np.testing.assert_array_equal(values, stored[key][:3], err_msg=f'{name} {key}')
    level = {key: values[0] for key, values in pool.block('SynthSeq', 0).items()}
    assert mission(level) == level_maker('SynthSeq')(0).mission


@pytest.mark.soak
def test_the_first_view_shows_the_object_carried_from_the_start():
    """minigrid hands it over after drawing the first observation."""
    env = BabyAI(levels='PutNextS7N4Carrying')
    params = env.make_params(None, num_levels=4)
    state = env.reset_level(0, params)
    name = int(state.name[state.held])
    carried = [4 + name // 6, name % 6]  # minigrid counts doors as 4, then key, ball, box
    turned = STEP(jax.random.key(0), state, LEFT, params)
    first, second = np.asarray(env.observe(None, state, None, params)), np.asarray(turned[0])
    assert first[3, 6].tolist() == [1, 0, 0] and second[3, 6].tolist()[:2] == carried


# ---- AgentGym's wrapper ------------------------------------------------------------------------


def compact(text):
    """Remove white space, since our sentences are on separate lines."""
    return ''.join(text.split())


def wrapper_game(data_idx):
    seed, index = divmod(int(data_idx), len(pool.LEVELS))
    with contextlib.redirect_stdout(io.StringIO()):
        return Wrapper(gymnasium.make(f'minigrid:{gym_id(pool.LEVELS[index])}').unwrapped, seed)


def choose(rng, game):
    """Draw an action: an available one, one that is rejected with a reason, or any name."""
    offered, reasons = list(game.actions), sorted(set(game.errors) & set(AGENTGYM.ACTION_NAMES))
    draw = rng.random()
    if draw < 0.1:
        return AGENTGYM.ACTION_NAMES[rng.integers(AGENTGYM.num_actions)]
    if draw < 0.2 and reasons:
        return reasons[rng.integers(len(reasons))]
    weights = np.array([3.0 if name.startswith(('go', 'tog', 'pick')) else 1.0 for name in offered])
    return str(rng.choice(offered, p=weights / weights.sum()))


@functools.cache
def wrapper_play():
    """Return (params, games: texts and rewards of AgentGym's wrapper, action by action)."""
    params = AGENTGYM.make_params(None, num_levels=40)
    rng, games = np.random.default_rng(0), []
    for data_idx in np.asarray(params.data_idx):
        game = wrapper_game(data_idx)
        rows = [(None, game.observation, 0.0, 0.0, False)]
        while len(rows) < 21 and not game.done:
            action = choose(rng, game)
            game.step(action)
            rows.append((action, game.observation, game.reward, game.score, game.done))
        games.append(rows)
    return params, games


@functools.cache
def our_play():
    """Return line ids [21, N, R], and rewards, ends and successes [20, N] of the same actions."""
    params, games = wrapper_play()
    index = {name: i for i, name in enumerate(AGENTGYM.ACTION_NAMES)}
    actions = np.full((20, len(games)), -1, np.int32)
    for row, game in enumerate(games):
        actions[: len(game) - 1, row] = [index[step[0]] for step in game[1:]]

    @jax.jit
    def run(actions):
        def step(states, action):
            one = jax.vmap(AGENTGYM.step_env, (None, 0, 0, None))
            _, states, reward, ended, _ = one(jax.random.key(0), states, action, params)
            return states, (jax.vmap(AGENTGYM.line_ids)(states), reward, ended, states.won)

        states = jax.vmap(AGENTGYM.reset_level, (0, None))(jnp.arange(len(games)), params)
        first = jax.vmap(AGENTGYM.line_ids)(states)
        ids, *rest = jax.lax.scan(step, states, actions)[1]
        return jnp.concatenate([first[None], ids]), *rest

    return jax.device_get(run(actions))


@pytest.mark.soak
@needs_minigrid
def test_macro_actions_have_the_texts_and_rewards_of_agentgyms_wrapper():
    """Compare texts without white space, rewards, score and end, on recorded play of all levels."""
    (params, games), (ids, rewards, ended, won) = wrapper_play(), our_play()
    lines = AGENTGYM.lines()
    for place, slot in enumerate(AGENTGYM.line_slots(params)):
        used = ids[..., place]
        assert ((used == -1) | ((used >= slot.start) & (used < slot.stop))).all(), place
    for row, game in enumerate(games):
        for turn, (action, text, reward, score, done) in enumerate(game):
            assert compact(texts.joined(lines, ids[turn, row])) == compact(text), (row, action)
            if turn:
                assert rewards[turn - 1, row] == pytest.approx(reward, abs=1e-6)
                assert rewards[:turn, row].sum() == pytest.approx(score, abs=1e-5)
                assert bool(ended[turn - 1, row]) == done
                assert bool(won[turn - 1, row]) == (score > 0)
    all_texts = compact(' '.join(step[1] for game in games for step in game))
    replies = 'nopath notrecognized Nochange barrier closed.You notcarryingakey'
    assert all(reply in all_texts for reply in replies.split())


@pytest.mark.soak
@needs_minigrid
@pytest.mark.parametrize('row', [0, 4, 13, 24, 38])
def test_the_served_world_has_the_exact_texts_and_rewards_of_agentgyms_wrapper(row):
    params, games = wrapper_play()
    world, game = workers.maker('babyai', {})(), games[row]
    assert world.reset(int(params.data_idx[row])) == game[0][1]
    for action, text, reward, score, done in game[1:]:
        reply = world.step(action)
        assert (reply.observation, reply.done) == (text, done), action
        assert reply.reward == pytest.approx(reward, abs=1e-6)
        assert world.details()['score'] == pytest.approx(score, abs=1e-5)


@needs_minigrid
@pytest.mark.soak
def test_the_served_world_handles_capitals_and_empty_commands_as_agentgym_does():
    """Commands were compared literally: 'Turn left' and '' were not recognized."""
    item = int(AGENTGYM.make_params(None, num_levels=1).data_idx[0])
    world, theirs = served.BabyAI(), wrapper_game(item)
    assert world.reset(item) == theirs.observation
    for action in ('', 'Turn LEFT', ' ', ' turn right\n', 'MOVE FORWARD', 'Check', 'Sing', ''):
        offered = action.lower().strip() in theirs.actions
        theirs.step(action)
        reply = world.step(action)
        assert reply.observation == theirs.observation, action
        assert reply.valid is (offered or action == 'Check')
        assert reply.reward == pytest.approx(theirs.reward, abs=1e-6)


@pytest.mark.parametrize('item', [-1, 2**31, 40_000_000])
def test_a_served_item_without_a_level_is_an_error(item, monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setitem(sys.modules, 'minigrid', None)
    with pytest.raises(ValueError, match=f'item {item}'):
        served.BabyAI().reset(item)


# ---- by hand -----------------------------------------------------------------------------------


def room(things, clauses, *, order=SINGLE, agent=(3, 3), side=7, strict=False):
    """Build one-room levels: things are (name, x, y), clauses {place: (kind, objects, others)}.

    The agent faces right.
    """
    levels = empty_levels(1)
    edge, inner = (1 << side) - 1, 1 | 1 << (side - 1)
    levels['walls'][0, :side] = [edge, *[inner] * (side - 2), edge]
    for key, value in dict(width=side, height=side, max_steps=100, order=order).items():
        levels[key][:] = value
    levels['strict'][0, 0] = strict
    levels['agent'][:] = agent[1] * SIDE + agent[0]
    for index, (name, x, y) in enumerate(things):
        colour, *state, kind = name.split()
        levels['name'][0, index] = KINDS.index(kind) * 6 + COLOURS.index(colour)
        levels['cell'][0, index] = y * SIDE + x
        levels['door'][0, index] = sight.STATES.index(state[0]) if state else 0
    for place, (kind, *matching) in clauses.items():
        levels['clause'][0, place] = kind
        for matched, objects in enumerate(matching):
            levels['member'][0, list(objects)] |= np.uint8(1 << (2 * place + matched))
    return levels


def params_of(levels):
    arrays = dict(device_arrays(levels)) | {'data_idx': np.zeros(len(levels['agent']), np.int32)}
    return EnvParams(**{name: jnp.asarray(values) for name, values in arrays.items()})


STEP = jax.jit(BabyAI().step_env)


def play(levels, actions):
    """Return [(reward, ended)] of the actions, and the last state."""
    params, outcomes = params_of(levels), []
    state = BabyAI().reset_level(0, params)
    for action in actions:
        _, state, reward, ended, _ = STEP(jax.random.key(0), state, action, params)
        outcomes.append((round(float(reward), 4), bool(ended)))
    return outcomes, state


def won(steps):
    return round(1 - 0.9 * steps / 100, 4), True


NOTHING = (0.0, False)
BALL_KEY = [('red ball', 4, 3), ('blue key', 3, 4)]
THREE = [('red ball', 4, 3), ('blue key', 3, 1), ('green box', 3, 4)]
DOORS = [('red closed door', 4, 3), ('blue closed door', 3, 4)]


@pytest.mark.parametrize(
    'levels, actions, answers',
    [
        # The action that completes the first half also counts for the second half, and a carried
        # thing keeps its old position until something is dropped
        (
            room([('red ball', 4, 3)], {0: (PICK_UP, [0]), 2: (GO_TO, [0])}, order=BEFORE),
            [PICKUP],
            [won(1)],
        ),
        # "After" puts the second half first
        (
            room(BALL_KEY, {0: (GO_TO, [0]), 2: (GO_TO, [1])}, order=AFTER),
            [LEFT, RIGHT, RIGHT, LEFT],
            [NOTHING] * 3 + [won(4)],
        ),
        # Tasks of an "and" may be done in any order and stay done: the ball is carried to the cell
        # below the key and dropped; the agent went to the box on the way
        (
            room(THREE, {0: (PUT_NEXT, [0], [1]), 1: (GO_TO, [2])}),
            [PICKUP, RIGHT, LEFT, LEFT, DROP],
            [NOTHING] * 4 + [won(5)],
        ),
        # A strict task fails when another door is toggled
        (room(DOORS, {0: (OPEN_DOOR, [1])}), [TOGGLE, RIGHT, TOGGLE], [NOTHING] * 2 + [won(3)]),
        (room(DOORS, {0: (OPEN_DOOR, [1])}, strict=True), [TOGGLE], [(0.0, True)]),
    ],
)
def test_instructions_are_judged_action_by_action(levels, actions, answers):
    assert play(levels, actions)[0] == answers


def test_opening_a_box_reveals_its_content():
    levels = room([('red box', 4, 3), ('blue key', 0, 0)], {0: (PICK_UP, [1])})
    levels['content'][0, 0], levels['cell'][0, 1] = 1, -1
    outcomes, state = play(levels, [TOGGLE, PICKUP])
    assert outcomes[-1] == won(2) and int(state.cell[0]) == -1


def test_a_locked_door_opens_only_with_its_key_and_the_agent_keeps_the_key():
    things = [('green locked door', 4, 3), ('red key', 2, 3), ('green key', 3, 4)]
    levels = room(things, {0: (OPEN_DOOR, [0])})
    outcomes, state = play(levels, [TOGGLE, LEFT, LEFT, PICKUP, LEFT, LEFT, TOGGLE])
    assert outcomes[-1] == (0.0, False) and sight.STATES[int(state.door[0])] == 'locked'
    outcomes, state = play(levels, [RIGHT, PICKUP, LEFT, TOGGLE])
    assert outcomes[-1] == won(4) and int(state.held) == 2


def test_the_short_text_lists_the_task_objects_by_distance_wall_and_carried_object():
    things = [('red ball', 5, 3), ('blue closed door', 4, 2), ('grey key', 1, 1)]
    levels = room(things, {0: (GO_TO, [0])})
    levels['described'][0, 0, 0] = describe('red', 'ball')
    env, params = BabyAI(), params_of(levels)
    state = env.reset_level(0, params)
    assert env.observation_text(state) == (
        'go to the red ball\nred ball 2 ahead\nblue closed door 1 ahead 1 left\nwall 3 ahead\n'
    )
    assert 'carrying grey key\n' in env.observation_text(state.replace(held=jnp.int32(2)))
    few = dataclasses.replace(env, most_seen=1)
    assert 'red ball 2 ahead\nmore objects\nwall' in few.observation_text(state)


@pytest.mark.soak
def test_brief_macro_play_numbers_objects_and_reports_rejected_actions():
    things = [('red ball', 5, 3), ('red ball', 4, 1), ('grey key', 1, 1)]
    levels = room(things, {0: (GO_TO, [0])})
    levels['described'][0, 0, 0] = describe('red', 'ball')
    env, params = BabyAI(actions='macro', wording='brief'), params_of(levels)
    assert 'available actions' not in env.instruction
    step, name = jax.jit(env.step_env), env.ACTION_NAMES.index
    start = env.reset_level(0, params)
    template = 'go to the red ball\n{}red ball 1 2 ahead\nred ball 2 1 ahead 2 left\nwall 3 ahead\n'
    assert env.observation_text(start) == template.format('')
    for rejected in ('pick up red ball 3', 'check available actions'):
        state = step(jax.random.key(0), start, name(rejected), params)[1]
        assert env.observation_text(state) == template.format('nothing happens\n')
    same = start.replace(reply=jnp.int32(0))  # no change in state
    assert env.observation_text(same) == template.format('nothing happens\n')
    for slot, line in zip(env.line_slots(params), env.line_ids(state), strict=True):
        assert line == -1 or line in slot
    state = step(jax.random.key(0), start, name('go to red ball 1'), params)[1]
    assert 'red ball 1 1 ahead\n' in env.observation_text(state) and state.won


@pytest.mark.soak
def test_random_macro_play_draws_from_turns_and_the_listed_actions():
    things = [('red ball', 5, 3), ('blue open door', 4, 2), ('grey key', 1, 1)]
    levels = room(things, {0: (PICK_UP, [0])})
    levels['described'][0, 0, 0] = describe('red', 'ball')
    env, params = BabyAI(actions='macro'), params_of(levels)
    state = env.reset_level(0, params)
    names = {env.ACTION_NAMES[i] for i in np.flatnonzero(env.offered(state))}
    text = env.observation_text(state).split('Available actions: ')[1]
    listed = set(re.findall('"([^"]+)"', text)) - {'check available actions'}
    assert names == listed and 'pick up red ball 1' in names and len(names) > 4
    assert BabyAI().offered(state) is None
    won = env.random_success(params, [1, 200], rollouts=20)
    assert 0 < won[0, 0] < 0.6 and 0.8 < won[1, 0] < 1  # the level has a step limit


def describe(colour, kind):
    """Return the number of 'the <colour> <kind>'."""
    description = f'the {colour} {kind}'
    return next(n for n in range(DESCRIPTIONS) if phrase(n) == description)


def test_solvable_success_is_the_success_rate_on_solvable_levels():
    """Two of three levels are solvable and one of them is won: 1/2, regardless of the third."""
    levels = room([('red ball', 5, 3)], {0: (GO_TO, [0])})
    levels = {key: np.repeat(values, 3, axis=0) for key, values in levels.items()}
    levels['length'][:] = [1, 1, -1]
    actions = jnp.array([[[FORWARD]], [[LEFT]], [[FORWARD]]])
    got = BabyAI().episode_metrics(actions, jnp.arange(3), params_of(levels))['solvable_success']
    assert float(got.mean()) == pytest.approx(0.5)


# ---- the expert --------------------------------------------------------------------------------


def test_the_expert_fails_only_on_impossible_levels_and_one_other():
    """These have strict doors to open in sequence, or keys locked in by their own doors."""
    unsolved = {
        name: int((pool.block(name, 0)['length'] < 0).sum())
        for name in pool.LEVELS
        if (pool.block(name, 0)['length'] < 0).any()
    }
    assert set(unsolved) == {'GoToImpUnlock', 'OpenDoorsOrderN4Debug', 'Unlock', 'SynthS5R2'}
    assert unsolved['SynthS5R2'] == 1  # the only one that is not impossible
    orders = pool.block('OpenDoorsOrderN4Debug', 0)
    np.testing.assert_array_equal(orders['length'] < 0, orders['order'] != 0)


# ---- pools -------------------------------------------------------------------------------------


def test_a_pool_splits_its_levels_evenly_among_names_and_numbers_them(monkeypatch):
    params = BabyAI(levels='PickupLoc,GoToDoor,Unlock').make_params('train', num_levels=7)
    names = [pool.LEVELS[i % 40] for i in np.asarray(params.data_idx)]
    assert names == ['PickupLoc', 'GoToDoor', 'Unlock'] * 2 + ['PickupLoc']
    monkeypatch.setattr(pool, 'block_keys', lambda name, at: [b'%d' % at] * (256 if at else 250))
    assert [n // 40 for n in pool.share('GoToDoor', None, 3, seed=0)] == [0, 250, 506]


def test_agentgyms_ids_select_levels_in_their_order():
    env = BabyAI(train_ids='6,0:3,498', test_ids='3:5')
    params = env.make_params('train', num_levels=5)
    assert np.asarray(params.data_idx).tolist() == [6, 0, 1, 2, 498]
    last = {key: values[12] for key, values in pool.block('PickupLoc', 0).items()}  # 12 * 40 + 18
    np.testing.assert_array_equal(params.cell[4], last['cell'])
    for split in ('validation', 'test'):
        assert env.make_params(split, num_levels=2).data_idx.tolist() == [3, 4]


@needs_minigrid
def test_further_levels_are_exported_once_and_cached(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(pool, 'BLOCK_SEEDS', 2)
    pool.block.cache_clear()
    number = 253 * 40 + 3  # GoToObjS6, seed 253: the second one of block 2
    levels = pool.numbered([number])
    np.testing.assert_array_equal(levels['cell'], export_levels('GoToObjS6', [253])['cell'])
    (cache_file,) = tmp_path.rglob('*.npz')
    assert cache_file.name == 'GoToObjS6-2.npz' and pool.MINIGRID in cache_file.parent.name
    monkeypatch.setattr(pool, 'export_levels', None)
    pool.block.cache_clear()
    np.testing.assert_array_equal(pool.numbered([number])['cell'], levels['cell'])
    pool.block.cache_clear()
