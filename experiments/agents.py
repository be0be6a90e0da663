"""What are plans and thoughts of small policies worth at equal sampled tokens?

Three agents (agentrl_jax/text/README.md) on lakes of six by six, where the goal is up to ten moves
away and more, and on Sokoban: `act` answers with actions alone; `think` has a thought in front of
each answer; `plan` writes a plan before its first action. All train with turn GRPO, have three
turns that act, and use one tokenizer, in which the tags of all kinds of turns are single tokens
(tokens/agents.model). The arms `reflect` and `retry`, of two trials that are paid for the last one,
need agent.reward=gain; commit 55cb303 was the last with it.

Every arm has a clone of its own, since its turns are others. Demonstrations follow the expert in
clone.oracle of the turns that act; what is written, a thought or a plan, always names what the
expert would do. Arms that write are taught more of it: they begin elsewhere, and the
policies they start from have rows of their own.

Equal sampled tokens: as in turn_credit, each column is read at the tokens of its least run. Arms
that write sample more in a step and have fewer of them.

tiny   The demo's policy; 16 x 8 episodes, four optimiser steps on them, one pass. A third to two
       thirds of the steps of act for the others; every arm of a seed clones for itself.

Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s.
"""

import sys

from experiments import common
from experiments.turn_credit import EPISODES, SAME

CONFIG = 'configs/small.py'
ROWS = ('agent.name', 'agent.trials', 'env.think')
ACTS, NAMES_ALL = 9, 21  # sampled tokens of four actions, and of ten between tags, with their ends
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
    """Tokens that hold the longest episode of an arm, in steps of 8."""
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
