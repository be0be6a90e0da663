import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen_vocabulary
import smollm_vocabulary

from agentrl_jax.envs import Bandit, FrozenLake, Sokoban, bandit
from agentrl_jax.envs.frozen_lake import world as frozen_lake
from agentrl_jax.envs.frozen_lake.levels import FROZEN, GOAL, HOLE, START
from agentrl_jax.envs.sokoban import world as sokoban
from agentrl_jax.envs.sokoban.solver import FLOOR, TARGET, WALL
from agentrl_jax.text import lines
from agentrl_jax.tokens import chat
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tools import demo_tokenizer

COUNT = 200  # random states of an environment


@functools.cache
def tokenizer(name):
    if name == 'qwen':
        return qwen_vocabulary.qwen_tokenizer()
    if name == 'smollm':
        return smollm_vocabulary.smollm_tokenizer()
    return load_tokenizer(demo_tokenizer.DEMO_MODEL)


def lakes(env, count, seed=0):
    """Return boards with one goal and one start, random holes, and the player anywhere."""
    rng = np.random.default_rng(seed)
    cells = env.size**2
    board = np.where(rng.random((count, cells)) < 0.3, HOLE, FROZEN)
    places = rng.permuted(np.tile(np.arange(cells), (count, 1)), axis=1)
    board[np.arange(count), places[:, 0]] = GOAL
    board[np.arange(count), places[:, 1]] = START
    return frozen_lake.EnvState(
        time=np.zeros(count, np.int32),
        board=board.reshape(count, env.size, env.size).astype(np.int8),
        position=rng.integers(cells, size=count, dtype=np.int32),
    )


def rooms(env, count, seed=0):
    """Return walled rooms with random walls, targets, boxes and player, solvable or not."""
    rng = np.random.default_rng(seed)
    n, k = env.dim, env.num_boxes
    inner = np.where(rng.random((count, (n - 2) ** 2)) < 0.3, WALL, FLOOR)
    places = rng.permuted(np.tile(np.arange((n - 2) ** 2), (count, 1)), axis=1)
    rows = np.arange(count)[:, None]
    on_target = rng.random(count)[:, None] < 0.3
    boxes = np.zeros_like(inner, bool)
    boxes[rows, np.where(on_target, places[:, :k], places[:, k : 2 * k])] = True
    inner[boxes] = FLOOR
    inner[rows, places[:, :k]] = TARGET
    # The player is on the floor, or on a target without a box.
    spot = np.where(on_target[:, 0] | (rng.random(count) < 0.5), places[:, 2 * k], places[:, 0])
    inner[np.arange(count), places[:, 2 * k]] = FLOOR
    fixed = np.full((count, n, n), WALL, np.int8)
    fixed[:, 1:-1, 1:-1] = inner.reshape(count, n - 2, n - 2)
    room = np.zeros((count, n, n), bool)
    room[:, 1:-1, 1:-1] = boxes.reshape(count, n - 2, n - 2)
    player = (spot // (n - 2) + 1) * n + spot % (n - 2) + 1
    return sokoban.EnvState(
        time=np.zeros(count, np.int32), fixed=fixed, boxes=room, player=player.astype(np.int32)
    )


def questions(env, count, seed=0):
    rng = np.random.default_rng(seed)
    return bandit.EnvState(
        time=np.zeros(count, np.int32),
        pair=rng.integers(len(env._all_pairs), size=count, dtype=np.int32),
        high=rng.integers(2, size=count, dtype=np.int32),
        pulled=np.full(count, -1, np.int32),
    )


def padded(rows, width):
    """Return rows of ids as an array, with -1 after the end."""
    array = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


WORLDS = {
    'lake': (FrozenLake(), lakes),
    'lake_cells': (FrozenLake(observation_format='cells'), lakes),
    'lake_coordinates': (FrozenLake(observation_format='grid_coord'), lakes),
    'room': (Sokoban(), rooms),
    'room_8x8': (Sokoban(dim=8, num_boxes=2), rooms),
    'room_coordinates': (Sokoban(observation_format='grid_coord'), rooms),
    'bandit': (Bandit(), questions),
}


CASES = [*((world, 'qwen') for world in WORLDS), ('lake', 'demo'), ('room', 'demo')]
CASES += [('room_coordinates', 'smollm'), ('bandit', 'smollm')]


@pytest.mark.soak
@pytest.mark.parametrize(('world', 'name'), CASES)
def test_states_render_as_the_tokenizer_would(world, name):
    """Ids gathered from the table on the device equal encode(observation_text) on the host."""
    env, make = WORLDS[world]
    states = make(env, COUNT)
    texts = [env.observation_text(jax.tree.map(lambda x, i=i: x[i], states)) for i in range(COUNT)]
    once = list(dict.fromkeys(texts))  # the bandit has few
    ids = dict(zip(once, tokenizer(name).encode_batch(once), strict=True))
    expected = [ids[text] for text in texts]
    width = max(map(len, expected)) + 3
    table = lines.build_line_table(tokenizer(name), env.lines(None))
    # these tables have no context-dependent lines, so older runs stay reproducible
    assert table.variant is None or name == 'smollm'

    @jax.jit
    def show(table, states):
        rows = jax.vmap(lambda state: env.line_ids(state, None))(states)
        return jax.vmap(lambda row: lines.gather_lines(table, row, width=width))(rows)

    tokens, length = jax.device_get(show(table, states))
    np.testing.assert_array_equal(length, [len(ids) for ids in expected])
    np.testing.assert_array_equal(tokens, padded(expected, width))


def test_gather_by_hand():
    # Lines [5, 6, 7], [] and [8]; rows 0, nothing, 2, 1, 0 make 5 6 7 8 5 6 7.
    table = lines.LineTable(
        ids=jnp.array([[5, 6, 7], [-1, -1, -1], [8, -1, -1]]), length=jnp.array([3, 0, 1])
    )
    tokens, count = lines.gather_lines(table, jnp.array([0, -1, 2, 1, 0]), width=9)
    assert (tokens.tolist(), int(count)) == ([5, 6, 7, 8, 5, 6, 7, -1, -1], 7)
    tokens, count = lines.gather_lines(table, jnp.array([0, -1, 2, 1, 0]), width=5)
    assert (tokens.tolist(), int(count)) == ([5, 6, 7, 8, 5], 7)  # the count reveals the loss
    tokens, count = lines.gather_lines(table, jnp.array([-1, -1]), width=2)
    assert (tokens.tolist(), int(count)) == ([-1, -1], 0)


def test_extra_rows_follow_the_lines():
    demo = tokenizer('demo')
    opening = chat.build_chat(demo).user_open('Reward:\n')
    table = lines.build_line_table(demo, ['a\n', ''], extra_rows=[opening, [7]])
    assert table.length.tolist() == [len(demo.encode('a\n')), 0, len(opening), 1]
    tokens, count = lines.gather_lines(table, jnp.array([2, 0]), width=40)
    assert tokens[: int(count)].tolist() == [*opening, *demo.encode('a\n')]


def test_lines_that_merge_with_their_neighbours_are_rejected():
    qwen = tokenizer('qwen')
    with pytest.raises(ValueError, match='b'):
        lines.build_line_table(qwen, ['a\n', 'b'])
    # Qwen2.5 has a token for two newlines, also between words and a blank line.
    with pytest.raises(ValueError, match='a'):
        lines.build_line_table(qwen, ['a\n', '\n'])
    opening = chat.build_chat(qwen).user_open('')
    with pytest.raises(ValueError, match='Turn'):
        lines.build_line_table(qwen, ['\nTurn\n'], extra_rows=[opening])
    close = chat.build_chat(qwen).answer_open('<think>')  # only an answer follows it
    lines.build_line_table(qwen, ['Turn\n', '#_\n', 'a\n\n'], extra_rows=[opening, close])
    lines.build_line_table(tokenizer('demo'), ['a\n', '\n', '\nTurn\n'])
