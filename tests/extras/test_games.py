"""Games of pgx and gymnax as environments, and observations in pieces."""

import functools
import importlib.util

import every_world
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen_vocabulary
import real_tokenizers
from every_world import World

from agentrl_jax.extras.games import base, experts
from agentrl_jax.extras.games.pieces import Choice, Grid, Layout, Number, Offers
from agentrl_jax.extras.games.worlds import WORLDS
from agentrl_jax.settings.rules import broken_by
from agentrl_jax.text import lines
from agentrl_jax.text import task as text
from agentrl_jax.tokens import chat
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tools import demo_tokenizer

pytestmark = pytest.mark.soak

needs_pgx = pytest.mark.skipif(
    importlib.util.find_spec('pgx') is None, reason='pip install -r requirements-test.txt'
)
CASES = [
    pytest.param(world, marks=needs_pgx if issubclass(world, base.PgxWorld) else (), id=name)
    for name, world in WORLDS.items()
]
CHECKS = [  # both references are simulated, see experts below
    *every_world.TEXTS,
    every_world.terminal_states_are_absorbing,
    every_world.rewards_are_multiples_of_the_quantum_within_the_bounds,
    every_world.the_same_seed_gives_the_same_pool_and_another_seed_another,
    every_world.splits_share_no_level,
]
KEY = jax.random.key(0)
Game2048, ConnectFour, Leduc, Catch, Minesweeper = WORLDS.values()


SETTINGS = {Game2048: dict(goal=16)}  # reachable in ten actions


@functools.cache
def game_of(world, **settings):
    return World(world(**(SETTINGS[world] if world in SETTINGS else {}), **settings))


@functools.cache
def tokenizer(name):
    if name in real_tokenizers.FILES:
        return real_tokenizers.real_tokenizer(name)
    if name == 'qwen':
        return qwen_vocabulary.qwen_tokenizer()
    return load_tokenizer(demo_tokenizer.DEMO_MODEL)


@functools.cache
def step(env):
    return jax.jit(env.step_env)


# ---- pieces ------------------------------------------------------------------------------------


LINES = Layout(Offers(('Up', 'Down', 'Left')), Choice(('one', 'two')))
TRIMMED = Layout(Grid(('.', 'X', 'o'), 3, 2, blank='', trimmed=True))


@pytest.mark.parametrize(
    'layout, values, text',
    [
        (Layout(Grid(('.', 'X', '16'), 2, 3)), ([[0, 1, 2], [2, 2, 0]],), '. X 16\n16 16 .\n'),
        *[(Layout(Number('Chips: ', 3)), (n,), f'Chips: {n}\n') for n in (0, 7, 40, 105, 999)],
        (TRIMMED, ([[0, 0], [0, 2], [0, 0]],), '.o\n..\n'),
        (TRIMMED, ([[1, 0], [0, 0], [0, 2]],), 'X.\n..\n.o\n'),
        (TRIMMED, ([[0, 0], [0, 0], [0, 0]],), '..\n'),
        (LINES, ([True, False, True], 1), 'On offer: Up, Left\ntwo\n'),
        (LINES, ([False, True, False], 0), 'On offer: Down\none\n'),
        (LINES, ([False, False, False], -1), 'On offer: nothing\n'),
    ],
)
def test_pieces_appear_in_their_slots(layout, values, text):
    ids = np.asarray(layout.ids([jnp.asarray(value) for value in values]))
    assert all(i == -1 or i in slot for i, slot in zip(ids, layout.slots, strict=True))
    assert ''.join(layout.texts[i] for i in ids if i >= 0) == text


def test_pieces_are_checked_against_the_tokenizer():
    for second in ('ft\n', 'ft'):  # merges the two; the row does not end
        with pytest.raises(ValueError):
            lines.check_rows(tokenizer('demo'), ['Le', second], [range(1), range(1, 2)])
    texts = ['a', ' b', ' c\n', 'whole\n']
    slots = [range(3, 4), range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    pieces = lines.check_rows(tokenizer('demo'), texts, slots)
    assert (pieces.all, pieces.inner) == ({'a', ' b', ' c\n'}, {' b', ' c\n'})


# ---- every game --------------------------------------------------------------------------------


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize('world', CASES)
def test_a_game_passes_the_checks_of_every_world(world, check):
    check(game_of(world))


REAL = [
    pytest.param(name, False, marks=pytest.mark.slow('reads prompts of real checkpoints'))
    for name in ('qwen', *real_tokenizers.FILES)
]


@pytest.mark.parametrize('name, short', [('demo', False), ('demo', True), *REAL])
@pytest.mark.parametrize('world', CASES)
def test_prompts_equal_the_tokens_of_their_text(world, name, short):
    """Check every state of some random play."""
    game, vocabulary = game_of(world, short=True) if short else game_of(world), tokenizer(name)
    task = text.build_task(game.env, game.params, vocabulary, style='brief')
    picked = np.random.default_rng(0).permutation(len(game.states.time))[:60]
    states = jax.tree.map(lambda x: x[picked], game.states)

    @jax.jit
    @jax.vmap
    def prompt(state):
        episode = text.begin(task, jnp.int32(0)).replace(state=state)
        return text.turn_tokens(task, episode, jnp.bool_(True))

    tokens, count = jax.device_get(prompt(states))
    assert count.max() <= task.width
    prefix = np.asarray(task.prefix).tolist()
    for i in range(len(picked)):
        state = jax.tree.map(lambda x, i=i: x[i], states)
        ids = prefix + tokens[i, : count[i]].tolist()
        decoded = vocabulary.decode(ids, show_special=True)
        assert game.env.observation_text(state) in decoded
        assert chat.tokenize(vocabulary, decoded) == ids


@pytest.mark.parametrize('world', CASES)
def test_an_action_that_is_not_on_offer_changes_nothing(world):
    game = game_of(world)
    states = game.states
    offers = np.asarray(jax.jit(jax.vmap(game.env.offers))(states.game))
    open_ = ~game.over(states)
    if offers[open_].all():
        pytest.skip('everything is always on offer')
    row, action = (int(x[0]) for x in np.nonzero(~offers & open_[:, None]))
    state = jax.tree.map(lambda x: jnp.asarray(x[row]), states)
    assert int(game.env.env_action(state, action)) == -1
    _, after, reward, ended, info = step(game.env)(KEY, state, action, game.params)
    jax.tree.map(np.testing.assert_array_equal, after.game, state.game)
    assert not reward and not ended and not info['effective']


@functools.cache
def transitions(world, levels=16, actions=12):
    """Return (state, action, next state, reward) of random legal actions in the first levels."""
    game, rng = game_of(world), np.random.default_rng(1)
    env, params = game.env, game.params
    offers = jax.jit(jax.vmap(env.offers))
    act = jax.jit(jax.vmap(env.step_env, in_axes=(None, 0, 0, None)))
    states, result = every_world.over_each_row(env.reset_level)(np.arange(levels), params), []
    for _ in range(actions):
        weight = rng.random((levels, env.num_actions)) * np.asarray(offers(states.game))
        action = weight.argmax(1)
        _, after, reward, *_ = act(KEY, states, action, params)
        steps = jax.device_get((states, action, after, reward))
        live = np.flatnonzero(~game.over(steps[0]))
        result += [jax.tree.map(lambda x, i=i: x[i], steps) for i in live]
        states = after
    return result


def same(left, right):
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.parametrize(
    'world, field',
    [
        (Minesweeper(mines=15), 'minesweeper.mines'),
        (Game2048(goal=4), 'game_2048.goal'),
        (Game2048(goal=24), 'game_2048.goal'),
    ],
)
def test_a_game_that_starts_won_or_cannot_be_won_is_rejected(world, field):
    (broken,) = broken_by(world)
    assert broken.fields == (field,)
    assert not broken_by(Minesweeper()) and not broken_by(Game2048())


@needs_pgx
def test_2048_equals_pgx():
    """A step of pgx with the level's random numbers gives the same game."""
    env = game_of(Game2048).env
    pgx_step = jax.jit(env.game().step)
    for before, action, after, reward in transitions(Game2048):
        step_key = jax.random.fold_in(jax.random.key(before.seed), before.time + 1)
        game = pgx_step(before.game, action, jax.random.fold_in(step_key, 0))
        assert same(game, after.game) and float(game.rewards[0]) == reward * env.goal


@needs_pgx
@pytest.mark.parametrize('world', [ConnectFour, Leduc])
def test_a_two_player_game_equals_pgx_and_the_opponent_moves_legally(world):
    """Some move of the opponent leads from the state after pgx's step to ours."""
    env = game_of(world).env
    pgx_step = jax.jit(env.game().step)
    every = jax.jit(jax.vmap(env.game().step, in_axes=(None, 0)))
    answered = 0

    def reached(game, reward, after, gained):
        if game.terminated or game.current_player == 0:
            return same(game, after) and reward == gained
        nonlocal answered
        answered += 1
        replies = jax.device_get(every(game, np.arange(env.num_actions)))
        allowed = [
            jax.tree.map(lambda x, i=i: x[i], replies)
            for i in np.flatnonzero(game.legal_action_mask)
        ]
        return any(reached(reply, reward + reply.rewards[0], after, gained) for reply in allowed)

    for before, action, after, reward in transitions(world):
        game = jax.device_get(pgx_step(before.game, action))
        assert reached(game, game.rewards[0], after.game, reward)
    assert answered > 20


def test_catch_equals_gymnax():
    env = game_of(Catch).env
    gymnax_step = jax.jit(env.game().step_env)
    for before, action, after, reward in transitions(Catch):
        _, game, gained, over, _ = gymnax_step(KEY, before.game, action, env.game().default_params)
        assert (
            same(game, after.game) and gained == reward and over == env.is_terminated(after, None)
        )


# ---- experts -----------------------------------------------------------------------------------


def discs(*rows):
    """Return (mine, theirs), bool [1, 6, 7], from the lowest rows."""
    board = np.array([list(row) for row in (('.......',) * (6 - len(rows)) + rows)])[None]
    return board == 'X', board == 'o'


@pytest.mark.parametrize(
    'column, rows',
    [
        (2, ('oo.o...', 'XX.X...')),  # completes four, although the opponent also has three
        (3, ('XX.....', 'ooo....')),  # blocks the opponent's four
        (0, ('X......', 'X......', 'X..oo.o')),
        (3, ('..Xo...', '.XoX...', 'Xooo...')),  # a diagonal
    ],
)
def test_the_connect_four_expert_wins_or_else_blocks(column, rows):
    assert experts.best_columns(*discs(*rows)).tolist() == [column]


def test_the_connect_four_expert_leaves_no_win_above_its_disc():
    # A disc in the first or fifth column would support the fourth of their row.
    (column,) = experts.best_columns(*discs('.ooo...', '.oXX...')).tolist()
    assert column not in (0, 4)


# ---- by hand -----------------------------------------------------------------------------------


@needs_pgx
def test_2048_merges_equal_tiles_and_ends_at_its_goal():
    env = Game2048(goal=8)
    params = env.make_params(num_levels=2)
    state = env.reset_level(jnp.int32(0), params)
    board = jnp.zeros(16, jnp.int32).at[jnp.array([0, 1, 4, 5])].set(jnp.array([1, 1, 2, 2]))
    planes = jax.nn.one_hot(board.reshape(4, 4), 31, dtype=bool)
    start = state.replace(game=state.game.replace(_board=board, observation=planes))
    assert env.observation_text(start).startswith('2 2 . .\n4 4 . .\n. . . .\n')
    _, after, reward, ended, info = step(env)(KEY, start, 0, params)
    rows = env.observation_text(after).splitlines()
    assert rows[0].startswith('4') and rows[1].startswith('8') and bool(ended)
    assert float(reward) == (4 + 8) / 8 and bool(info['success'])
