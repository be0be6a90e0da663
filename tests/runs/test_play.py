"""Playing an environment in the terminal, by hand and with a policy."""

import itertools

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import play
from agentrl_jax.run import loading, parts
from agentrl_jax.run.config import read as read_config


def game(name, lines, level=2, **changes):
    """Return (return, solved, output) of a game in which a person types these lines."""
    raw_cfg = micro_runs.config(name, **{'env.max_turns': 9, 'rollout.max_tokens': 640} | changes)
    cfg = read_config(raw_cfg, None)
    task = parts.build_text_task(cfg, loading.build_tokenizer(cfg), 'validation', None)
    output, typed = [], itertools.chain(lines(task), itertools.repeat(''))
    result = play.play_by_hand(
        task, level=level, seed=0, ask=lambda prompt: next(typed), say=output.append
    )
    return *result, '\n'.join(output)


def test_the_oracle_s_plan_typed_by_hand_solves_the_level():
    changes = {'frozen_lake.success_rate': 1.0, 'env.max_actions_per_episode': 20}

    def lines(task):
        state = jax.device_get(task.env.reset_level(np.int32(4), task.env_params))
        states = jax.tree.map(lambda x: np.asarray(x)[None], state)
        (plan,) = task.env.plans(states, np.zeros(1, int), 20, task.env_params)
        names = [task.env.ACTION_NAMES[i] for i in plan]
        return [' || '.join(names[i : i + 2]) for i in range(0, len(names), 2)]

    total, solved, output = game('frozen_lake', lines, level=4, **changes)
    assert solved and total == pytest.approx(1.0) and output.endswith('\nsolved, return 1')
    board = output[output.index('The end') :]  # the last state used to be missing
    assert '√' in board and 'P' not in board
    assert 'slippery' not in output and 'player on goal' in output
    assert output.count('actions left') >= 3 and 'Turn 3 of 9' in output


def test_the_end_of_a_game_shows_the_board_and_the_reason():
    """The game printed 'turn budget' or 'terminated', without a board."""
    firm = {'frozen_lake.success_rate': 1.0}
    lines = ['Left', 'jump']  # not an action
    total, solved, output = game('frozen_lake', lambda task: lines, **firm, **{'env.max_turns': 2})
    assert not solved and output.endswith(f'\nnot solved: all 2 turns are played, return {total:g}')
    assert output[output.index('The end') :].count('P') == 1
    assert total == pytest.approx(-0.1) and 'not a list of valid actions' in output
    changes = firm | {'env.max_actions_per_episode': 1}
    *_, output = game('frozen_lake', lambda task: ['Left'], **changes)
    assert 'not solved: all 1 actions are used' in output and 'slippery' not in output
    *_, output = game('frozen_lake', lambda task: [], **{'frozen_lake.success_rate': 0.5})
    assert output.endswith('\nnot solved: the player quit, return 0') and 'slippery' in output


@pytest.mark.parametrize('config, workdir', [(None, ''), (micro_runs.plain('bandit'), 'runs/demo')])
def test_a_policy_plays_only_with_the_config_of_its_run(config, workdir):
    """A --config in addition to --workdir silently gave the policy other prompts."""
    with pytest.raises(ValueError, match='either a --config, .* or a --workdir'):
        play.config_to_play(config, workdir)
