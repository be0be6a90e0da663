"""Shared start, step size and tables of the FrozenLake experiments.

The start is a clean but improvable policy: 256 clean episodes of the expert, 150 steps of cloning,
about 47 % of held-out maps. RL takes it to 75 % (experiments/beyond_clone). All arms of a seed
share it.
"""

from experiments import common

CONFIG = 'configs/demo.py'
FEW = {
    'clone.episodes': 256,
    'clone.oracle': 1.0,
    'clone.steps': 150,
    'clone.batch': 64,
    'clone.lr': 2e-3,
}
BATCH = {'batch.minibatch_rows': 32, 'batch.microbatch_rows': 32}
CONSTANT = {'optim.schedule': 'constant', 'optim.schedule_steps': 0, 'optim.final_lr': 0.0}
EPISODES = 128  # per step, as in RAGEN
EVALUATIONS = 8  # per run
RATES = (1e-3, 2.5e-4)
PLAIN = {  # fields other than the estimator that the presets would set
    'loss.kl_coef': 0.0,
    'loss.clip_low': 0.2,
    'loss.clip_high': 0.2,
    'loss.aggregation': 'token_mean',
    'filter.rule': 'all',
    'rollout.num_groups': 16,
    'rollout.group_size': 8,
}


def plan(cells, more, rows, baseline, **fields):
    """Return the plan of named cells, all with `more`, and its tables `last` and `area`."""
    cells = {label: FEW | CONSTANT | BATCH | more | arm for label, arm in cells.items()}
    table = {
        'rows': ','.join(rows),
        'baseline': baseline,
        'labels': common.labels(CONFIG, cells, rows),
        'at': 'last-three',
        'margin': 0.05,
        'clones': 'from_nothing',
    } | fields
    tables = {'last': table, 'area': table | {'at': 'area', 'curves': False}}
    return common.Plan(CONFIG, tuple(cells.values()), tables)
