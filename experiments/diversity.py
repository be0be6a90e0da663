"""How many answers should a prompt have, where a step has 128 episodes?

RAGEN (arXiv:2504.20073, Table 2) finds four best for PPO with its filter. The advantage of PPO does
not see groups, so there the number says how many maps a step has (and what the filter can choose
from); RLOO's baseline is made of the group. PPO, PPO with the filter and RLOO from 1 to 32 answers
at two rates, so that a row is not good only because its steps are small.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 60
       steps of 128 episodes.

Endpoint: success at the last three validations (mean), the better of two rates in a row's name.
Predicted before the first run: without the filter PPO is flat within five points from 1 to 16;
RLOO is worst at 2, where its baseline is one other episode, and flat from 4 to 16; 32 answers of
four maps are worst for PPO; four are not best beyond their interval anywhere.
"""

import sys

from experiments import common, lake_start

ROWS = ('algorithm', 'filter.keep', 'rollout.group_size', 'optim.lr')
SIZES = (1, 2, 4, 8, 16, 32)
METHODS = {
    'PPO': {'algorithm': 'ppo'},
    'RLOO': {'algorithm': 'rloo', 'critic.share_backbone': False, 'loss.value_coef': 0.0},
    'PPO, quarter kept': {'algorithm': 'ppo', 'filter.keep': 0.25},
}


def possible(method, size):
    """A group of one has no other member and no spread; of four groups a quarter is one."""
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
    more = lake_start.FEW | lake_start.CONSTANT | {'steps': 60, 'eval.every': 10}
    more |= {'batch.minibatch_rows': 32, 'batch.microbatch_rows': 32}
    cells = {label: more | arm for label, arm in CELLS.items()}
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'PPO, 4, 0.00025',
        'labels': common.labels(lake_start.CONFIG, cells, ROWS),
        'at': 'last-three',
        'margin': 0.05,
    }
    tables = {'last': table, 'area': table | {'at': 'area', 'curves': False}}
    return common.Plan(lake_start.CONFIG, tuple(cells.values()), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
