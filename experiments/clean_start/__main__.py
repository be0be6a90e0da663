"""Why does RL make a good clone worse, and which single change fixes it?

The demo of 2026-11-24 cloned play that was 30 % oracle and trained 35 -> 72 %. A clone of clean
play starts at 80 %, but the same 200 steps took it down to 72 % as well: RL ended at the same
level from both starts. Each arm here changes one setting of that run.

tiny   FrozenLake and policy of configs/small.py, 100 steps from the clone of 4,096 clean episodes
       (400 steps of cloning); all arms of a seed share it.
"""

import sys

from experiments import common

CLEAN = {'clone.oracle': 1.0, 'clone.episodes': 4096, 'clone.steps': 400, 'clone.lr': 4e-3}
DEMO = {  # the original setting: StarPO-S with the most varied quarter of the groups
    'steps': 100,
    'optim.lr': 1e-3,
    'filter.keep': 0.25,
    'batch.minibatch_rows': 32,
    'batch.epochs': 2,
    'loss.clip_high': 0.28,
    'loss.entropy_coef': 0.005,
    'loss.value_coef': 0.5,
    'loss.whiten': True,
    'env.train_levels': 4096,
}
WHOLE = {'filter.keep': 1.0, 'batch.minibatch_rows': 128}  # four updates a step, as in the demo
CALM = {'optim.lr': 2.5e-4, 'loss.entropy_coef': 0.0}
ARMS = {
    'demo': {},
    'quarter of the rate': {'optim.lr': 2.5e-4},
    'all groups, as many updates': WHOLE,
    'no entropy bonus': {'loss.entropy_coef': 0.0},
    'one pass': {'batch.epochs': 1},
    'one minibatch': {'batch.minibatch_rows': 64},
    'clip 0.2': {'loss.clip_high': 0.2},
    'tenth of the critic': {'loss.value_coef': 0.05},
    'raw advantages': {'loss.whiten': False},
    '65,536 maps': {'env.train_levels': 65536},
    'all groups, quarter of the rate': WHOLE | CALM,
    'all groups, one update': CALM | {'filter.keep': 1.0, 'batch.minibatch_rows': 256},
}
ROWS = [name for name in DEMO if name != 'steps']


def tiny():
    cells = {name: CLEAN | DEMO | arm for name, arm in ARMS.items()}
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'demo',
        'clones': 'expert_clones',
        'labels': common.labels('configs/small.py', cells, ROWS),
        'signals': 'rollout/success,policy/entropy,group/return_std',
    }
    best = table | {'at': 'best-validation', 'curves': False}
    return common.Plan('configs/small.py', tuple(cells.values()), {'last': table, 'best': best})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
