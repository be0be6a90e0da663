"""Playing an environment in the terminal, by hand and with a policy."""

import itertools

import jax
import micro_runs
import numpy as np
import pytest

from agentrl_jax import play
from agentrl_jax.run import loading, parts
from agentrl_jax.run.config import read as read_config


def played(name, lines, level=2, **changes):
    """(return, solved, output) of a game in which a person types these lines."""
    face = micro_runs.config(name, **{'env.max_turns': 9, 'rollout.max_tokens': 640} | changes)
    cfg = read_config(face, None)
    task = parts.build_text_task(cfg, loading.build_tokenizer(cfg), 'validation', None)
    said, typed = [], itertools.chain(lines(task), itertools.repeat(''))
    found = play.play_by_hand(
        task, level=level, seed=0, ask=lambda prompt: next(typed), say=said.append
    )
    return *found, '\n'.join(said)


def test_the_oracle_s_plan_typed_by_hand_solves_the_level():
    changes = {'frozen_lake.success_rate': 1.0, 'env.max_actions_per_episode': 20}

    def lines(task):
        state = jax.device_get(task.env.reset_level(np.int32(4), task.env_params))
        states = jax.tree.map(lambda x: np.asarray(x)[None], state)
        (plan,) = task.env.plans(states, np.zeros(1, int), 20, task.env_params)
        names = [task.env.ACTION_NAMES[i] for i in plan]
        return [' || '.join(names[i : i + 2]) for i in range(0, len(names), 2)]

    total, solved, said = played('frozen_lake', lines, level=4, **changes)
    assert solved and total == pytest.approx(1.0) and said.endswith('\nsolved, return 1')
    board = said[said.index('The end') :]  # the last state used to be missing
    assert '√' in board and 'P' not in board
    assert 'slippery' not in said and 'player on goal' in said
    assert said.count('actions left') >= 3 and 'Turn 3 of 9' in said


def test_the_end_of_a_game_shows_the_board_and_says_why():
    """It printed 'turn budget' or 'terminated', without a board."""
    firm = {'frozen_lake.success_rate': 1.0}
    lines = ['Left', 'jump']  # not an action
    total, solved, said = played('frozen_lake', lambda task: lines, **firm, **{'env.max_turns': 2})
    assert not solved and said.endswith(f'\nnot solved: all 2 turns are played, return {total:g}')
    assert said[said.index('The end') :].count('P') == 1
    assert total == pytest.approx(-0.1) and 'not a list of valid actions' in said
    changes = firm | {'env.max_actions_per_episode': 1}
    *_, said = played('frozen_lake', lambda task: ['Left'], **changes)
    assert 'not solved: all 1 actions are used' in said and 'slippery' not in said
    *_, said = played('frozen_lake', lambda task: [], **{'frozen_lake.success_rate': 0.5})
    assert said.endswith('\nnot solved: the player quit, return 0') and 'slippery' in said


@pytest.mark.parametrize('given, workdir', [(None, ''), (micro_runs.plain('bandit'), 'runs/demo')])
def test_a_policy_plays_with_no_config_but_that_of_its_run(given, workdir):
    """A --config in addition to --workdir silently gave the policy other prompts."""
    with pytest.raises(ValueError, match='either a --config, .* or a --workdir'):
        play.config_to_play(given, workdir)
