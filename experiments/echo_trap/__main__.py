"""Do many updates, large updates or the rate make PPO collapse on Sokoban, and what predicts it?

RAGEN (arXiv:2504.20073) keeps a quarter of the groups (StarPO-S) to prevent collapse and names the
in-group std of returns as the sign to watch. Its filter also leaves a quarter of the updates. Here
passes over a rollout, minibatch rows and rate are crossed. The most varied quarter is compared with
the least varied quarter and a random one (two groups are played). StarPO-S, GRPO with and without
the std, and PPO without an entropy bonus run at both rates.

tiny   The policy of configs/demo_sokoban.py, cloned on play that is half oracle, RAGEN's 8 x 16
       episodes, return at the last token, 100 steps.

Endpoint: success at the last three validations (mean). A run has collapsed if that is at most three
quarters of its best validation. Predicted before the first run: at 2.5e-4 no arm collapses,
regardless of the number of updates. At 1e-3 the arms with 8 passes collapse and the three quarters
do not; the least varied and the random quarter collapse no more often than the most varied one. A
falling std separates collapsing runs no better than falling success or valid format.
"""

import sys

from experiments import common
from experiments.ragen_starpo_vs_s.__main__ import CLIP, FILTER, METHODS, NO_KL, PPO, SIZES

ROWS = (
    'algorithm',
    'filter.keep',
    'filter.smallest',
    'rollout.num_groups',
    'loss.clip_high',
    'loss.norm',
    'loss.entropy_coef',
    'batch.epochs',
    'batch.minibatch_rows',
    'optim.lr',
)
FAST, SLOW = {'optim.lr': 1e-3}, {'optim.lr': 2.5e-4}
GRPO = METHODS['GRPO']


def name(what, rate):
    return f'{what}, {rate["optim.lr"]:g}'


CROSSED = {
    name(f'PPO, {epochs} x {128 // rows} updates', rate): PPO
    | {'batch.epochs': epochs, 'batch.minibatch_rows': rows}
    | rate
    for rate in (FAST, SLOW)
    for epochs in (2, 8)
    for rows in (32, 128)
}
QUARTERS = {
    'most varied quarter': PPO | FILTER,
    'least varied quarter': PPO | FILTER | {'filter.smallest': True},
    'random quarter': PPO | {'rollout.num_groups': 2},
}
OTHERS = {
    'StarPO-S': PPO | FILTER | CLIP | NO_KL,
    'GRPO': GRPO,
    'GRPO without std': GRPO | {'loss.norm': 'mean'},
    'PPO without entropy': PPO | {'loss.entropy_coef': 0.0},
}
CELLS = (
    CROSSED
    | {name(what, FAST): arm | FAST for what, arm in QUARTERS.items()}
    | {name(what, rate): arm | rate for rate in (FAST, SLOW) for what, arm in OTHERS.items()}
)


MORE = SIZES | {
    'loss.entropy_coef': 0.005,
    'steps': 100,
    'eval.every': 10,
    'batch.epochs': 2,
    'alarm.mi_every': 5,
    'alarm.mi_text': 'answer',
}


def tiny():
    config = 'configs/demo_sokoban.py'
    cells = {label: MORE | arm for label, arm in CELLS.items()}
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'PPO, 2 x 4 updates, 0.001',
        'clones': 'expert_clones',
        'labels': common.labels(config, cells, ROWS),
        'at': 'last-three',
        'margin': 0.05,
    }
    tables = {
        'last': table | {'signals': 'group/return_std,policy/entropy,policy/grad_norm'},
        'area': table | {'at': 'area', 'curves': False},
        'best': table | {'at': 'best-validation', 'curves': False},
    }
    return common.Plan(config, tuple(cells.values()), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
