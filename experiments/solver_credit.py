"""Is it worth asking a solver, or playing on, to know what a turn was worth?

FrozenLake knows what the best player would still earn from any state, so turns can be credited by
it: CAST as its paper has it (arXiv:2607.25308, a tenth of it beside the episode's advantage), that
signal alone (biased: it asks what the best player would do next), and the same value as a baseline
of what was earned (lam 1, no bias). Beside them turn GRPO and RLOO, which have the other members of
the group, and vine, which plays on from every later turn, or from the one where the policy was
least sure (BPO, arXiv:2607.14171). Arms differ in credit only: clip range .2, token mean, no KL,
as many optimiser steps. At two rates, so that none is good only because its steps are small.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 60
       steps of 128 episodes; with continuations 48, which take about as many turns.

Endpoint: success at the last three validations (mean), for each arm at the better of its rates.
Predicted before the first run: the value as a baseline is two to five points above turn GRPO, and
CAST between the two; the signal alone begins fastest, in area above all others, and ends no higher
than the baseline, since a turn that leaves the goal in reach costs it nothing; turn GRPO and RLOO
are within two points of each other; vine from every turn and from the unsure one are within two
points of each other and below turn GRPO, for their steps have 48 maps' episodes and not 128.
"""

import sys

from experiments import common, lake_start

ROWS = (
    'algorithm',
    'turn_credit.outcome_coef',
    'loss.lam',
    'fork.turns',
    'optim.lr',
)
FEWER = {  # continuations are played too; four optimiser steps as everywhere
    'rollout.num_groups': 12,
    'rollout.group_size': 4,
    'batch.minibatch_rows': 12,
    'batch.microbatch_rows': 12,
}
ALONE = {'algorithm': 'cast', 'turn_credit.turn_coef': 1.0, 'turn_credit.outcome_coef': 0.0}
ARMS = {
    'turn GRPO': {'algorithm': 'turn_grpo'},
    'RLOO': {'algorithm': 'rloo'},
    'vine': {'algorithm': 'vine'} | FEWER,
    'BPO': {'algorithm': 'vine', 'fork.turns': 'unsure', 'fork.continuations': 3} | FEWER,
    'CAST': {'algorithm': 'cast'},
    'solver alone': ALONE,
    'solver as baseline': ALONE | {'loss.lam': 1.0},
}
CELLS = {
    f'{name}, {rate:g}': lake_start.PLAIN | arm | {'optim.lr': rate}
    for name, arm in ARMS.items()
    for rate in lake_start.RATES
}


def tiny():
    more = {'steps': 60, 'eval.every': 10}
    return lake_start.plan(CELLS, more, ROWS, 'turn GRPO, 0.00025')


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
