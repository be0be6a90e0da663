"""Does predicting observations help a policy act, and does it learn to predict them?

ECHO (arXiv:2605.24517) adds .1 times the cross-entropy of observations to GRPO and doubles the
share of TerminalBench 2 that a model solves (2.7 to 5.2 %). A terminal does not reveal whether this
is knowledge of the environment or more gradient from the same episodes. The environments here are
small enough to know. FrozenLake and Sokoban determine an observation from the previous one and the
action; the cards of the catalogue cannot be predicted before they are read. Weights are 0, .1 and
1. Clone, episodes, steps and passes are those of experiments/turn_credit, with turn GRPO.

Equal sampled tokens: as in turn_credit, each column is read at the tokens of its shortest run.

tiny   The demo's policy; 16 x 8 episodes, four optimiser steps on them, one pass; five seeds.

Endpoints: success at equal tokens, and -log p per token of held-out observations
(eval/observation_nll), for each policy on its own episodes. Predicted before the first run:
observations become likelier at .1 and more so at 1 in all three environments, by more than a tenth
of a nat on Sokoban and FrozenLake and by less in the catalogue. At .1 success is within three
points of weight 0 everywhere; at 1 it is below on Sokoban by more than three.
"""

import sys

from experiments import common
from experiments.turn_credit.__main__ import CONFIG, EPISODES, NAMES, SAME, V2, world

ROWS = ('loss.observation_coef',)
ARMS = {
    'actions alone': {'loss.observation_coef': 0.0},
    'world, .1': {'loss.observation_coef': 0.1},
    'world, 1': {'loss.observation_coef': 1.0},
}
LIKELIHOOD = 'eval/observation_nll'


def tiny():
    worlds = {
        'library': world('configs/demo_library.py')
        | V2
        | {'steps': 40, 'clone.episodes': 16384, 'clone.steps': 1600},
        'sokoban': world('configs/demo_sokoban.py') | {'steps': 30, 'clone.steps': 1000},
        'frozen_lake': {'steps': 40, 'clone.steps': 500},
    }
    shared = EPISODES | SAME | {'algorithm': 'turn_grpo', 'eval.every': 10}
    shared['eval.observations'] = True
    cells = tuple(
        {'env.name': name} | more | shared | arm
        for arm in ARMS.values()
        for name, more in worlds.items()
    )
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'at': 'equal-tokens',
        'baseline': 'actions alone',
        'clones': 'expert_clones',
        'labels': common.labels(CONFIG, ARMS, ROWS) | NAMES,
        'signals': f'{LIKELIHOOD},policy/entropy',
    }
    tables = {
        'success': table | {'overall': True, 'margin': 0.03},
        'likelihood': table | {'metric': LIKELIHOOD, 'also': 'eval/success'},
        'last': table | {'at': 'last', 'curves': False, 'also': f'eval/valid_format,{LIKELIHOOD}'},
    }
    return common.Plan(CONFIG, cells, tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
