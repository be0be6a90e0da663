"""How many answers per prompt are best when a step has 128 episodes?

RAGEN (arXiv:2504.20073, Table 2) finds four best for PPO with its filter. PPO's advantage ignores
groups, so there the number sets the number of maps per step (and the choice the filter has). RLOO
computes its baseline from the group. PPO, PPO with the filter and RLOO run with 1 to 32 answers at
two rates, so that no row looks good only because its steps are small.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 60
       steps of 128 episodes.

Endpoint: success at the last three validations (mean), for each size at the better of its rates.
Predicted before the first run: without the filter PPO is flat within five points from 1 to 16.
RLOO is worst at 2, where its baseline is one other episode, and flat from 4 to 16. PPO is worst at
32, with four maps. Four answers are nowhere best beyond their interval.
"""

import sys

from experiments import common, lake_start

ROWS = ('algorithm', 'filter.keep', 'rollout.group_size', 'optim.lr')
SIZES = (1, 2, 4, 8, 16, 32)
METHODS = {
    'PPO': {'algorithm': 'ppo'},
    'RLOO': {'algorithm': 'rloo'},
    'PPO, quarter kept': {'algorithm': 'ppo', 'filter.keep': 0.25},
}


def possible(method, size):
    """Return whether a method works with this group size; RLOO and the filter need two members."""
    return size > 1 or method == 'PPO'


CELLS = {
    f'{method}, {size}, {rate:g}': arm
    | {
        'rollout.group_size': size,
        'rollout.num_groups': lake_start.EPISODES // size,
        'optim.lr': rate,
    }
    for method, arm in METHODS.items()
    for rate in lake_start.RATES
    for size in SIZES
    if possible(method, size)
}


def tiny():
    more = {'steps': 60, 'eval.every': 10}
    return lake_start.plan(CELLS, more, ROWS, 'PPO, 4, 0.00025')


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
