"""How good is a clone of the expert that costs the same as the runs of a table?

This is the row *expert clone* in the tables of other experiments: a policy of their size, with
their prompts and limits. It spends the cost of one of their runs, including that run's clone, on
unlimited clean play of the expert. If this row is above an RL arm, the arm is not worth its
cost unless demonstrations are scarce or there is no expert.

tiny   One clone per environment in the form that the tables use. FrozenLake has one whose answers
       include a thought and one with one move a turn; the one under the grammar is `clone` of
       experiments/from_nothing. Each trains on 16,384 episodes for the core seconds of a run and
       its clone in the table of experiments/README.md, at the rate and batch of from_nothing.

Endpoint: success at the end. Predicted before the first run: FrozenLake above every arm of
ragen_starpo_vs_s, turn_credit and scaling_inter by more than five points, Sokoban above every arm
of echo_trap, the catalogue and search within five points of the oracle, and the Bandit at it.
"""

import sys

from experiments import common
from experiments.mtgrpo_search import __main__ as mtgrpo_search
from experiments.ragen_starpo_vs_s import __main__ as ragen_starpo_vs_s
from experiments.scaling_inter import __main__ as scaling_inter
from experiments.turn_credit import __main__ as turn_credit

BASE = 'configs/demo_cloned.py'
EXPERT = {
    'clone.episodes': 16384,
    'clone.oracle': 1.0,
    'clone.lr': 4e-3,
    'algorithm': 'grpo',
    'steps': 0,
}
TASK_FIELDS = (
    'env',
    'model',
    'rollout',
    'search',
    'hosts',
    'library',
    'bandit',
)  # fix the policy's task
ROWS = ('env.name', 'env.max_turns')


def world(module, name, config=''):
    """Return the TASK_FIELDS fields of an experiment's first run in an environment."""
    plan = module.tiny()
    cell = next(cell for cell in plan.cells if cell.get('env.name', name) == name)
    fields = common.difference(BASE, config or plan.config) | cell
    return {field: value for field, value in fields.items() if field.split('.')[0] in TASK_FIELDS}


WORLDS = {
    'Sokoban': (world(ragen_starpo_vs_s, 'sokoban'), 1500),
    'FrozenLake, thinking': (world(ragen_starpo_vs_s, 'frozen_lake'), 1500),
    'catalogue': (world(turn_credit, 'library'), 1500),
    'FrozenLake, a move a turn': (world(scaling_inter, 'frozen_lake'), 1000),
    'search': (world(mtgrpo_search, 'search'), 1000),
    'Bandit': (world(ragen_starpo_vs_s, 'bandit'), 100),
}
CELLS = {name: EXPERT | task | {'clone.steps': steps} for name, (task, steps) in WORLDS.items()}


def tiny():
    table = {'rows': ','.join(ROWS), 'labels': common.labels(BASE, CELLS, ROWS), 'curves': False}
    return common.Plan(BASE, tuple(CELLS.values()), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
