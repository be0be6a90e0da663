"""Do plans and thoughts help small policies at equal sampled tokens?

Three agents (agentrl_jax/text/README.md) play FrozenLake with 6 x 6 cells, where the goal can be
ten moves away or more, and Sokoban. `act` answers with actions only, `think` writes a thought
before each answer, and `plan` writes a plan before its first action. All train with turn GRPO and
have three acting turns. They share a tokenizer with single tokens for the tags of all turns
(tokens/agents.model). The arms `reflect` and `retry`, with two trials and a reward for the last
one, need agent.reward=gain. Commit 55cb303 was the last with that option.

Each arm has its own clone because its turns differ. Demonstrations follow the expert in the share
clone.oracle of the acting turns, while a thought or plan always names the expert's actions. Arms
that write therefore learn more about the expert; their starting policies have their own rows.

Equal sampled tokens: as in turn_credit, each column is read at the tokens of its shortest run. Arms
that write sample more tokens per step and take fewer steps.

tiny   The demo's policy; 16 x 8 episodes, four optimiser steps on them, one pass. The other arms
       take a third to two thirds of the steps of `act`. Every arm clones once per seed.

Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s.
"""

import sys

from experiments import common
from experiments.turn_credit.__main__ import EPISODES, SAME

CONFIG = 'configs/small.py'
ROWS = ('agent.name', 'agent.trials', 'env.think')
ACTS, NAMES_ALL = (
    9,
    21,
)  # sampled tokens of four actions, and of ten between tags, with their ends
ARMS = {
    'act': {'env.think': False, 'env.max_turns': 3, 'rollout.max_response': ACTS},
    'think': {
        'env.think': True,
        'env.max_turns': 3,
        'rollout.max_response': ACTS + NAMES_ALL,
        'clone.thoughts': True,
    },
    'plan': {
        'agent.name': 'plan',
        'env.think': False,
        'env.max_turns': 4,
        'rollout.max_response': NAMES_ALL,
    },
}
STEPS = {'act': 60, 'think': 20, 'plan': 40}
PREFIX, TURN = 7, {'frozen_lake': 24, 'sokoban': 18}  # tokens of the longest prompts
NAMES = {'sokoban': 'Sokoban', 'frozen_lake': 'FrozenLake'}


def budget(arm, world):
    """Return the tokens of an arm's longest episode, rounded up to a multiple of 8."""
    longest = PREFIX + arm['env.max_turns'] * (TURN[world] + arm['rollout.max_response'])
    return 8 * -(-longest // 8)


def tiny():
    worlds = {
        'frozen_lake': {'frozen_lake.size': 6, 'clone.steps': 500},
        'sokoban': {'clone.steps': 600, 'clone.oracle': 0.5},
    }
    shared = EPISODES | SAME | {'algorithm': 'turn_grpo'}
    shared |= {'model.tokenizer': 'agentrl_jax/tokens/agents.model', 'eval.every': 10}
    cells = tuple(
        {'env.name': name, 'steps': STEPS[label], 'rollout.max_tokens': budget(arm, name)}
        | more
        | shared
        | arm
        for label, arm in ARMS.items()
        for name, more in worlds.items()
    )
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'at': 'equal-tokens',
        'baseline': 'act',
        'labels': common.labels(CONFIG, ARMS, ROWS) | NAMES,
        'signals': 'policy/entropy,rollout/response_length',
    }
    tables = {'one_trial': table, 'last': table | {'at': 'last', 'also': 'eval/valid_format'}}
    return common.Plan(CONFIG, cells, tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
