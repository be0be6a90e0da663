"""What are plans, thoughts and reflections of small policies worth at equal sampled tokens?

Five agents (agentrl_jax/text/README.md) on lakes of six by six, where the goal is up to ten moves
away and more, and on Sokoban: `act` answers with actions alone; `think` has a thought in front of
each answer; `plan` writes a plan before its first action; `reflect` writes a reflection after a
failed trial and tries the level again; `retry` tries it again with nothing written, which is the
control of `reflect`. All train with turn GRPO, have three turns that act in a trial, and use one
tokenizer, in which the tags of all kinds of turns are single tokens (tokens/agents.model).

Two trials are not one: `reflect` and `retry` are compared with each other, and so are `act`,
`think` and `plan`; in the last table, of all five, success in the first trial stands beside. Both
that try again are paid for their last trial (agent.reward=gain), as the others are for their only
one.

Every arm has a clone of its own, since its turns are others. Demonstrations follow the expert in
clone.oracle of the turns that act; what is written, a thought, a plan or a reflection, always names
what the expert would do. Arms that write are taught more of it: they begin elsewhere, and the
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
AGAIN = {'agent.trials': 2, 'agent.reward': 'gain'}
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
    'reflect': AGAIN
    | {
        'agent.name': 'reflect',
        'env.think': False,
        'env.max_turns': 7,
        'rollout.max_response': NAMES_ALL,
    },
    'retry': AGAIN | {'env.think': False, 'env.max_turns': 6, 'rollout.max_response': ACTS},
}
STEPS = {'act': 60, 'think': 20, 'plan': 40, 'reflect': 30, 'retry': 40}
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
    again = {'where': {'agent.trials': '2'}, 'baseline': 'retry'}
    also = 'eval/success_first,eval/trials,eval/gain,eval/valid_format'
    tables = {
        'one_trial': table | {'where': {'agent.trials': '1'}},
        'two_trials': table | again | {'also': also},
        'last': table | {'at': 'last', 'also': also},
    }
    return common.Plan(CONFIG, cells, tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
