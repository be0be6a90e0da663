"""Does RL beat behaviour cloning at equal compute, starting from clean demonstrations?

On FrozenLake the only data are 256 clean episodes of a perfect expert. `clone` spends the full
budget training on them; `clone, then RL` trains on them briefly and then plays. On Connect Four the
expert wins 88 % and plays any number of games, and `nothing` is RL from random weights. The card
catalogue has 16 clean episodes, because a clone of 32 already answers 98 %. Sokoban has 32, because
a clone of 128 already matches RL (27.7 against 28.9 %). All arms sample and are validated under the
answer grammar (rollout.constrain).

tiny   The policy of configs/demo.py; settings were tuned with seed 100. Costs are seconds of one
       core without compiling and validation.

Predicted before the tables, from seed 100: in the catalogue (20.3 against 86.9 %) RL is above its
clone by more than 40 points in each of five seeds, on Sokoban (18.0 against 30.5 %) by more than
five.
"""

import sys

from experiments import common

EXPERT = {'clone.oracle': 1.0, 'clone.batch': 64}
FEW = EXPERT | {'clone.episodes': 256, 'clone.lr': 2e-3}
BASE = 'configs/connect_four.py'
CONNECT_FOUR = {'env.name': 'connect_four'}
LAKE = common.difference(BASE, 'configs/demo.py')
FEWER = EXPERT | {'clone.episodes': 16, 'clone.batch': 16, 'clone.lr': 2e-3}
LITTLE = {'clone.episodes': 32, 'clone.batch': 32}
LIBRARY = common.difference(BASE, 'configs/demo_library.py') | {
    'env.think': False,
    'rollout.constrain': 'own',
}
SOKOBAN = common.difference(BASE, 'configs/demo_sokoban.py') | {
    'env.think': False,
    'rollout.constrain': 'own',
}
FALLING = {
    'steps': 200,
    'eval.every': 25,
    'filter.keep': 1.0,
    'loss.entropy_coef': 0.01,
    'batch.epochs': 1,
    'batch.minibatch_rows': 64,
    'batch.microbatch_rows': 64,
    'optim.lr': 1e-3,
    'optim.schedule': 'cosine',
    'optim.schedule_steps': 800,
    'optim.final_lr': 0.05,
}
ARMS = {
    'lake': {
        'clone': LAKE | FEW | {'clone.steps': 1500, 'steps': 0},
        'clone, then RL': LAKE
        | FEW
        | {
            'clone.steps': 150,
            'steps': 200,
            'optim.lr': 5e-4,
            'optim.schedule_steps': 800,
        },
    },
    'library': {
        'clone': LIBRARY | FEWER | {'clone.steps': 2000, 'steps': 0},
        'clone, then RL': LIBRARY | FEWER | {'clone.steps': 150, 'steps': 100},
    },
    'sokoban': {
        'clone': SOKOBAN | FEWER | LITTLE | {'clone.steps': 1200, 'steps': 0},
        'clone, then RL': SOKOBAN | FEWER | LITTLE | FALLING | {'clone.steps': 150},
    },
    'connect_four': {
        'clone': CONNECT_FOUR
        | EXPERT
        | {'clone.episodes': 8192, 'clone.lr': 4e-3, 'clone.steps': 600, 'steps': 0},
        'nothing': CONNECT_FOUR | {'clone.episodes': 0, 'steps': 110, 'optim.schedule_steps': 440},
    },
}
ROWS = ('clone.episodes', 'steps')


def tiny():
    tables = {}
    for world, arms in ARMS.items():
        tables[world] = {
            'rows': ','.join(ROWS),
            'baseline': 'clone',
            'where': {'env.name': next(iter(arms.values()))['env.name']},
            'labels': common.labels(BASE, arms, ROWS),
            'signals': 'rollout/success,policy/entropy',
        }
    cells = [cell for arms in ARMS.values() for cell in arms.values()]
    return common.Plan(BASE, tuple(cells), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
