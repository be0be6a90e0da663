"""Environments as text: prompts from tables, and the effects of answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_agents as tiny

from agentrl_jax.envs import FrozenLake
from agentrl_jax.envs.frozen_lake.levels import FROZEN, GOAL, HOLE, START
from agentrl_jax.envs.frozen_lake.world import EnvParams
from agentrl_jax.text import agents
from agentrl_jax.text import task as text
from agentrl_jax.types import EpisodeStop

LEFT, DOWN, RIGHT, UP = range(4)
UNKNOWN, ABSENT = -1, -2
STYLES = ('brief', 'ragen')


@pytest.mark.parametrize('name', tiny.NAMES)
def test_no_array_of_a_task_is_empty(name):
    """jaxlib 0.11.2 crashes when compiling a shard_map with an empty input."""
    episode = text.begin(tiny.task(name), jnp.int32(0))
    sizes = [np.size(leaf) for leaf in jax.tree.leaves((tiny.task(name), episode))]
    assert sizes and min(sizes) > 0


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


@pytest.mark.parametrize('style', STYLES)
def test_the_width_equals_that_of_the_longest_prompt(style):
    """Sokoban: six of the longest row, the longest reward, the warning and an appended end."""
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
    """Return a 4x4 lake without slips: start, ice and goal in the top row, a hole below start."""
    board = np.full((1, 4, 4), FROZEN, np.int8)
    board[0, 0] = [START, FROZEN, GOAL, FROZEN]
    board[0, 1, 0] = HOLE
    env_params = EnvParams(
        boards=jnp.asarray(board), optimal_length=jnp.array([2]), success_rate=jnp.float32(1.0)
    )
    settings = dict(style='brief') | tiny.BUDGETS | budgets
    return text.build_task(FrozenLake(), env_params, tiny.tokenizer(), **settings)


play_turn = jax.jit(text.play_turn)


def answer(task, parts, *, matched=True, turn=0, used=0):
    world = text.begin(task, 0).replace(turn=jnp.int32(turn), used=jnp.int32(used))
    parts = jnp.array([*parts, ABSENT, ABSENT, ABSENT][: task.max_actions_per_turn], jnp.int32)
    return play_turn(task, jax.random.key(0), world, parts, jnp.bool_(matched))


GOES, ENDS, SPENT = EpisodeStop.NONE, EpisodeStop.TERMINATED, EpisodeStop.ACTION_BUDGET
ANSWERS = {  # parts, actions used before -> cell, reward, faultless, actions, stop
    'valid: (0, 0) -> (0, 1) -> (1, 1)': ([RIGHT, DOWN], 0, 5, 0, True, [RIGHT, DOWN], GOES),
    'unknown names are dropped': ([UNKNOWN, RIGHT, UNKNOWN], 0, 1, 0, False, [RIGHT], GOES),
    'no known name': ([UNKNOWN, UNKNOWN], 0, 0, 0, False, [], GOES),
    'an empty answer': ([], 0, 0, 0, False, [], GOES),
    'no answer tags': (None, 0, 0, 0, False, [], GOES),
    'nothing is played after the goal': ([RIGHT, RIGHT, DOWN], 0, 2, 1, True, [RIGHT] * 2, ENDS),
    'a hole ends it without success': ([DOWN, RIGHT], 0, 4, 0, True, [DOWN], ENDS),
    'one of five actions is left': ([RIGHT, LEFT, RIGHT], 4, 1, 0, True, [RIGHT], SPENT),
}


@pytest.mark.parametrize('case', ANSWERS)
def test_answers_follow_the_rules(case):
    """A fault costs once; an answer without a valid action has no effect except a warning."""
    parts, used, position, reward, valid, actions, stop = ANSWERS[case]
    answer_parts = [RIGHT] if parts is None else parts
    result = answer(lake(), answer_parts, matched=parts is not None, used=used)
    world, outcome = jax.device_get(result)
    assert int(world.state.position) == position and float(world.reward) == reward
    assert float(outcome.reward) == reward and bool(outcome.valid) == valid
    assert float(outcome.penalty) == (0 if valid else np.float32(-0.1))
    assert bool(outcome.success) == (reward == 1) and int(outcome.stop) == stop
    assert [int(a) for a in outcome.actions if a >= 0] == actions
    assert int(outcome.num_actions) == len(actions) and bool(world.warn) == (not actions)
    assert int(world.turn) == 1


def test_the_reasons_to_stop_have_an_order():
    """Order: terminal state (including the step limit), action budget, turn budget."""
    last = dict(turn=2, used=3)  # of 3 turns and 5 actions
    stops = [
        int(answer(lake(), parts, **last)[1].stop)
        for parts in ([RIGHT, RIGHT], [RIGHT, LEFT], [RIGHT], [UNKNOWN])
    ]
    assert stops == [ENDS, SPENT, EpisodeStop.TURN_BUDGET, EpisodeStop.TURN_BUDGET]
    task = lake()
    task = task.replace(env_params=task.env_params.replace(max_steps_in_episode=2))
    _, outcome = answer(task, [RIGHT, LEFT, RIGHT])
    assert int(outcome.stop) == ENDS and int(outcome.num_actions) == 2


def test_openings_without_thoughts_and_unknown_openings():
    task = tiny.task('sokoban', generation_prefix='<answer>')
    tokens, count = text.turn_tokens(task, text.begin(task, 0), True)
    assert tiny.tokenizer().decode(tokens[:count]).endswith('assistant\n<answer>')
    with pytest.raises(ValueError, match="env.prompt='long' is not one of"):
        lake(style='long')
    with pytest.raises(ValueError, match="generation_prefix='<plan>' is not one of"):
        lake(generation_prefix='<plan>')


def test_each_further_trial_has_a_separate_line():
    three = tiny.task('frozen_lake', agent=agents.build_agent('reflect', trials=3))
    expected = [three.style.again.format(trial=n) for n in (2, 3)]
    for number, line in enumerate(expected):
        row = three.table.ids[three.offsets.again + number]
        length = int(three.table.length[three.offsets.again + number])
        assert tiny.tokenizer().decode(row[:length].tolist()) == line
