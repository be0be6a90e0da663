"""Environments as text: prompts written from tables, and what an answer does to the world."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.envs import FrozenLake
from agentrl_jax.envs.frozen_lake.levels import FROZEN, GOAL, HOLE, START
from agentrl_jax.envs.frozen_lake.world import EnvParams
from agentrl_jax.text import answer as answers
from agentrl_jax.text import task as text
from agentrl_jax.types import EpisodeStop

LEFT, DOWN, RIGHT, UP = range(4)
UNKNOWN, ABSENT = -1, -2
STYLES = ('brief', 'ragen')


def random_parts(rng, rows, names, per_turn):
    """Answers of 0 to per_turn parts; one part in six names nothing."""
    parts = rng.integers(-1, names, size=(rows, per_turn))
    parts[rng.random(parts.shape) < 0.15] = UNKNOWN
    parts[np.arange(per_turn)[None] >= rng.integers(per_turn + 1, size=(rows, 1))] = ABSENT
    return parts.astype(np.int32)


@functools.cache
def programs():
    show = jax.vmap(text.turn_tokens, in_axes=(None, 0, 0))
    play = jax.vmap(text.play_turn, in_axes=(None, 0, 0, 0, 0))
    return jax.jit(show), jax.jit(play)


def random_play(task, *, rows=24, seed=0):
    """Of each turn (turn, prompts, worlds, sampled_end, parts, matched, keys, after, outcome)."""
    rng, (show, play) = np.random.default_rng(seed), programs()
    level = jnp.arange(rows) % task.env.num_levels(task.env_params)
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, level)
    keys = jax.random.split(jax.random.key(seed), rows)
    for turn in range(task.max_turns):
        sampled_end = rng.random(rows) < 0.5
        prompts = jax.device_get(show(task, worlds, sampled_end))
        parts = random_parts(rng, rows, len(task.env.ACTION_NAMES), task.max_actions_per_turn)
        matched = rng.random(rows) < 0.85
        after, outcome = play(task, keys, worlds, parts, matched)
        yield turn, prompts, worlds, sampled_end, parts, matched, keys, after, outcome
        worlds = after


def row_of(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.slow('compiles every world in every style')
@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('name', tiny.NAMES)
def test_prompts_on_the_device_are_the_tokens_of_the_whole_text(name, style):
    task = tiny.task(name, style=style, max_turns=4, max_actions_per_episode=12)
    opening = tiny.opening_text(task.env, style, 12)
    shown, warned = set(), 0
    for turn, (tokens, count), worlds, sampled_end, *_ in random_play(task):
        worlds = jax.device_get(worlds)
        for i in range(len(count)):
            world = row_of(worlds, i)
            expected = tiny.turn_text(
                task.env,
                style,
                world.state,
                turn=turn,
                reward=world.reward,
                warn=world.warn,
                left=12 - world.used,
                sampled_end=sampled_end[i],
            )
            ids = tiny.spelled((opening if turn == 0 else '') + expected)
            given = [*(np.asarray(task.prefix) if turn == 0 else []), *tokens[i, : count[i]]]
            np.testing.assert_array_equal(given, ids)
            assert (tokens[i, count[i] :] == -1).all() and count[i] <= task.width
            shown.add(round(float(world.reward), 1))
            warned += bool(world.warn)
    assert warned > 5 and len(shown) > 1


@pytest.mark.slow('compares the texts of all boards')
@pytest.mark.parametrize('style', STYLES)
def test_the_anchor_of_a_board_does_not_know_turns_budgets_rewards_and_warnings(style):
    task = tiny.task('frozen_lake', style=style)
    world = text.begin(task, 0)
    later = world.replace(
        turn=jnp.int32(1), used=jnp.int32(3), reward=jnp.float32(-0.1), warn=jnp.bool_(True)
    )
    assert (
        text.turn_tokens(task, world, True)[0].tolist()
        != text.turn_tokens(task, later, True)[0].tolist()
    )
    assert text.anchor(task, world) == text.anchor(task, later)
    levels = jnp.arange(task.env.num_levels(task.env_params))
    states = jax.vmap(task.env.reset_level, in_axes=(0, None))(levels, task.env_params)
    worlds = jax.vmap(text.begin, in_axes=(None, 0))(task, levels)
    anchors = jax.vmap(text.anchor, in_axes=(None, 0))(task, worlds)
    boards = [task.env.observation_text(jax.tree.map(lambda x, i=i: x[i], states)) for i in levels]
    assert anchors.dtype == jnp.uint32 and len(set(anchors.tolist())) == len(set(boards))


def test_the_first_message_of_ragen_word_for_word():
    task = tiny.task('frozen_lake', style='ragen', max_actions_per_episode=10)
    tokens, count = text.turn_tokens(task, text.begin(task, 0), True)
    ids = [*np.asarray(task.prefix), *np.asarray(tokens[:count])]
    grid = task.env.observation_text(task.env.reset_level(0, task.env_params))
    assert tiny.tokenizer().decode(ids, show_special=True) == (
        "<|im_start|>system\nYou're a helpful assistant. You are solving the FrozenLake puzzle. "
        'Forbid the whole and go to the target. You may move to the unintended direction due to '
        'the slippery ice. Example answer format: <think>To forbid the hole and go to the target, '
        'I should go left then go up.</think><answer>Left || Up</answer>\n'
        'The meaning of each symbol in the state is:\nP: player, _: empty, O: hole, G: goal, '
        'X: player in hole, √: player on goal\nYour available actions are:\nLeft, Down, Right, Up\n'
        'You can make up to 10 actions, separated by the action separator " || "\n<|im_end|>\n'
        f'<|im_start|>user\n\nTurn 1:\nState:\n{grid}You have 10 actions left. Always output: '
        '<think> [Your thoughts] </think> <answer> [your answer] </answer> with no extra text. '
        'Strictly follow this format. Max response length: 100 words (tokens).\n<|im_end|>\n'
        '<|im_start|>assistant\n<think>'
    )


def test_answers_without_thoughts_open_with_the_answer_tag():
    task = tiny.task('sokoban', generation_prefix='<answer>')
    tokens, count = text.turn_tokens(task, text.begin(task, 0), True)
    assert tiny.tokenizer().decode(tokens[:count]).endswith('assistant\n<answer>')
    assert task.opening == '<answer>'


@pytest.mark.parametrize('style', STYLES)
def test_the_width_is_that_of_the_longest_prompt_and_no_longer(style):
    """Sokoban: the longest row six times, the longest reward, warning and appended end."""
    task = tiny.task('sokoban', style=style)
    size = lambda piece: len(tiny.spelled(piece))  # noqa: E731
    row = max(map(size, task.env.lines(None)))
    low, high = int(-1.1 * 3 * 10) - 1, int(10.9 * 3 * 10)  # three actions, in tenths
    parts = ['<|im_end|>\n<|im_start|>user\n', '<|im_end|>\n<|im_start|>assistant\n<think>']
    longest = 0
    if style == 'ragen':
        rewards = [f'{q / 10:.1f}\n\n' for q in range(low + 1, high + 1)]
        longest += max(map(size, rewards)) + size('Reward:\n')
        longest += max(size(f'Turn {k}:\nState:\n') for k in (1, 2, 3))
        parts += [tiny.WARNING]
        longest += max(size(tiny.TAIL.format(left=n)) for n in range(6))
    else:
        parts += ['Invalid.\n']
        longest += max(size(f'{n} left\n') for n in range(6))
    assert task.width == 6 * row + longest + sum(map(size, parts))


def lake(**budgets):
    """One 4x4 lake without slips: start, ice and goal in the first row, a hole below the start."""
    board = np.full((1, 4, 4), FROZEN, np.int8)
    board[0, 0] = [START, FROZEN, GOAL, FROZEN]
    board[0, 1, 0] = HOLE
    env_params = EnvParams(
        boards=jnp.asarray(board), optimal_length=jnp.array([2]), success_rate=jnp.float32(1.0)
    )
    settings = dict(style='brief') | tiny.BUDGETS | budgets
    return text.build_task(FrozenLake(), env_params, tiny.tokenizer(), **settings)


def answer(task, parts, *, matched=True, turn=0, used=0):
    world = text.begin(task, 0).replace(turn=jnp.int32(turn), used=jnp.int32(used))
    parts = jnp.array([*parts, ABSENT, ABSENT, ABSENT][: task.max_actions_per_turn], jnp.int32)
    return text.play_turn(task, jax.random.key(0), world, parts, jnp.bool_(matched))


def check(result, *, position, reward, penalty, valid, actions, stop, warn, success=False):
    world, outcome = jax.device_get(result)
    assert int(world.state.position) == position and float(world.reward) == reward
    assert float(outcome.reward) == reward and float(outcome.penalty) == np.float32(penalty)
    assert bool(outcome.valid) == valid and bool(outcome.success) == success
    assert [int(a) for a in outcome.actions if a >= 0] == actions
    assert int(outcome.num_actions) == len(actions) and int(outcome.stop) == stop
    assert bool(world.warn) == warn and int(world.turn) == 1


def test_a_valid_answer_is_played_and_nothing_is_charged():
    check(
        answer(lake(), [RIGHT, DOWN]),  # (0, 0) -> (0, 1) -> (1, 1)
        position=5,
        reward=0,
        penalty=0,
        valid=True,
        actions=[RIGHT, DOWN],
        warn=False,
        stop=EpisodeStop.NONE,
    )


def test_unknown_names_are_dropped_the_rest_is_played_and_the_fault_costs_once():
    check(
        answer(lake(), [UNKNOWN, RIGHT, UNKNOWN]),
        position=1,
        reward=0,
        penalty=-0.1,
        valid=False,
        actions=[RIGHT],
        warn=False,
        stop=EpisodeStop.NONE,
    )


@pytest.mark.parametrize(
    'parts, matched',
    [([UNKNOWN, UNKNOWN], True), ([], True), ([RIGHT], False)],
    ids=['no known name', 'an empty answer', 'no answer tags'],
)
def test_answers_without_a_valid_action_change_nothing_and_are_warned_about(parts, matched):
    check(
        answer(lake(), parts, matched=matched),
        position=0,
        reward=0,
        penalty=-0.1,
        valid=False,
        actions=[],
        warn=True,
        stop=EpisodeStop.NONE,
    )


def test_actions_behind_the_goal_are_not_played():
    check(
        answer(lake(), [RIGHT, RIGHT, DOWN]),
        position=2,
        reward=1,
        penalty=0,
        valid=True,
        actions=[RIGHT, RIGHT],
        warn=False,
        stop=EpisodeStop.TERMINATED,
        success=True,
    )


def test_a_hole_ends_the_episode_without_success():
    check(
        answer(lake(), [DOWN, RIGHT]),
        position=4,
        reward=0,
        penalty=0,
        valid=True,
        actions=[DOWN],
        warn=False,
        stop=EpisodeStop.TERMINATED,
    )


def test_actions_beyond_the_budget_of_the_episode_are_not_played():
    """4 of 5 are used: one of three is left. They were valid all the same."""
    check(
        answer(lake(), [RIGHT, LEFT, RIGHT], used=4),
        position=1,
        reward=0,
        penalty=0,
        valid=True,
        actions=[RIGHT],
        warn=False,
        stop=EpisodeStop.ACTION_BUDGET,
    )


def test_the_reasons_to_stop_have_an_order():
    """Terminal state before action budget before turn budget."""
    last = dict(turn=2, used=3)  # of 3 turns and 5 actions
    stops = [
        int(answer(lake(), parts, **last)[1].stop)
        for parts in ([RIGHT, RIGHT], [RIGHT, LEFT], [RIGHT], [UNKNOWN])
    ]
    names = (EpisodeStop.TERMINATED, EpisodeStop.ACTION_BUDGET)
    assert stops == [*names, EpisodeStop.TURN_BUDGET, EpisodeStop.TURN_BUDGET]


def test_an_environment_that_runs_out_of_steps_is_over():
    task = lake()
    task = task.replace(env_params=task.env_params.replace(max_steps_in_episode=2))
    _, outcome = answer(task, [RIGHT, LEFT, RIGHT])
    assert int(outcome.stop) == EpisodeStop.TERMINATED and int(outcome.num_actions) == 2


def test_answers_are_cut_at_the_actions_of_a_turn():
    """Four actions are named, three are allowed: the fourth is not even looked at."""
    task = lake()
    said = '</think><answer>Right || right ||Down|| Fly</answer>'
    state = answers.init_answer(task.answer, 1)
    for token in tiny.tokenizer().encode(said):
        state = answers.advance(task.answer, state, jnp.array([token]), jnp.array([True]))
    assert bool(answers.matched(task.answer, state)[0])
    np.testing.assert_array_equal(state.parts[0], [RIGHT, RIGHT, DOWN])


@pytest.mark.slow('plays episodes by hand beside the device')
@pytest.mark.parametrize('name', tiny.NAMES)
def test_random_answers_do_what_the_rules_say(name):
    """Against the rules written as a plain loop, one environment step at a time."""
    task = tiny.task(name, max_turns=3, max_actions_per_turn=4, max_actions_per_episode=7)
    stopped = set()
    for turn, _, worlds, _, parts, matched, keys, after, outcome in random_play(task, rows=16):
        worlds, after, outcome = jax.device_get((worlds, after, outcome))
        for i in range(16):
            hand = tiny.play_by_hand(
                task,
                row_of(worlds.state, i),
                keys[i],
                turn,
                int(worlds.used[i]),
                bool(matched[i]),
                parts[i].tolist(),
            )
            jax.tree.map(np.testing.assert_array_equal, row_of(after.state, i), hand['state'])
            acted = outcome.actions[i]
            np.testing.assert_array_equal(acted[acted >= 0], hand['actions'])
            assert outcome.reward[i] == hand['reward'] and outcome.valid[i] == hand['valid']
            assert outcome.penalty[i] == np.float32(hand['penalty'])
            assert after.warn[i] == hand['warn'] and after.used[i] == hand['used']
            assert outcome.stop[i] == hand['stop'] and outcome.success[i] == hand['success']
            stopped.add(int(outcome.stop[i]))
    assert len(stopped) >= 2


@pytest.mark.parametrize('limit', [1, 2, 3])
def test_an_episode_may_be_given_fewer_turns_than_there_is_room_for(limit):
    task = tiny.task('sokoban').replace(turn_limit=jnp.int32(limit))
    for turn, *_, outcome in random_play(task):
        ends = np.isin(outcome.stop, [EpisodeStop.TERMINATED, EpisodeStop.ACTION_BUDGET])
        expected = EpisodeStop.TURN_BUDGET if turn + 1 >= limit else EpisodeStop.NONE
        assert not ends.all() and (outcome.stop[~ends] == expected).all()


def test_wordings_and_openings_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="env.prompt='long' is not one of"):
        lake(style='long')
    with pytest.raises(ValueError, match="generation_prefix='<plan>' is not one of"):
        lake(generation_prefix='<plan>')
