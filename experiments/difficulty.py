"""Do levels that are neither solved nor hopeless teach more than all alike, at equal tokens?

Pools by difficulty are in most stacks of 2026; marin (issue 8765) found no gain at equal cost. Here
the share `curriculum.uncertain` of a step's draws prefers levels by p (1 - p), with a pool that is
seen seven times (256 maps) and one that is seen twice (1,024).

tiny   RLOO on FrozenLake under the grammar from a few clean demonstrations
       (experiments/lake_start.py), 120 steps of 16 groups of 8 episodes.

Endpoint: success at the last three validations (mean), of maps that no step plays. Predicted before
the first run: with 1,024 maps no difference beyond three points; with 256 a share of 0.5 is ahead
at equal tokens by two to five points while the policy is below 70 %, and level with uniform draws
at the end; fewer groups without spread in both.
"""

import sys

from experiments import common, lake_start

ROWS = ('env.train_levels', 'curriculum.uncertain')
CELLS = {
    f'{levels} maps, {uncertain:g}': {
        'env.train_levels': levels,
        'curriculum.uncertain': uncertain,
    }
    for levels in (256, 1024)
    for uncertain in (0.0, 0.5, 0.9)
}


def tiny():
    more = {
        'algorithm': 'rloo',
        'rollout.num_groups': 16,
        'rollout.group_size': 8,
        'optim.lr': 5e-4,
        'steps': 120,
        'eval.every': 15,
    }
    signals = 'rollout/success,group/zero_std_frac'
    return lake_start.plan(CELLS, more, ROWS, '256 maps, 0', signals=signals)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
