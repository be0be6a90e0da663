"""Are fresh rollouts better, or only smaller updates?

RAGEN (arXiv:2504.20073, Fig 10, Online-k) plays k times the episodes at once, keeps the most varied
quarter of the groups and makes k updates of them. Updates and episodes are the same for every k;
only the age of the policy that played differs. The arms `reuse` play the same number of episodes
per step for every k and pass k times over them. Each arm runs at two rates; at the smaller one old
episodes are less off-policy.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 120
       updates of 32 rows, which cost 15,360 episodes (online) and 15,360 / k (reuse).

Endpoint: success at the last three validations (mean). Predicted before the first run: at 2.5e-4
online k = 1, 2, 5, 10 are within five points of each other; at 1e-3 k = 10 is below k = 1 by more.
Reuse is below online at k = 10 and 1e-3, and no worse for its episodes at 2.5e-4.

Second stage, because three seeds were not conclusive: online k = 1 and 10 at both rates, ten seeds.
  python -m experiments.freshness --scale=tiny --seeds=10 \\
      --only=rollout.num_groups=8,batch.epochs=1 --only=rollout.num_groups=80
Predicted before seeds 3 to 9: at 2.5e-4 the two are the same within five points, at 1e-3 k = 10 is
above k = 1, by less than five, and a quarter of the rate is worth more than either.
"""

import sys

from experiments import common, lake_start

ROWS = ('rollout.num_groups', 'batch.epochs', 'optim.lr')
UPDATES, GROUPS = 120, 8
KS = (1, 2, 5, 10)


def cell(k, groups, epochs, rate):
    steps = UPDATES // k
    return {
        'rollout.num_groups': groups,
        'rollout.group_size': lake_start.EPISODES // GROUPS,
        'batch.epochs': epochs,
        'steps': steps,
        'eval.every': max(steps // lake_start.EVALUATIONS, 1),
        'optim.lr': rate,
    }


CELLS = {
    f'online {k}, {rate:g}': cell(k, GROUPS * k, 1, rate) for rate in lake_start.RATES for k in KS
} | {f'reuse {k}, {rate:g}': cell(k, GROUPS, k, rate) for rate in lake_start.RATES for k in KS[1:]}


def tiny():
    first = {'where': {'seed': '0|1|2'}, 'seeds': 3}
    plan = lake_start.plan(CELLS, {'filter.keep': 0.25}, ROWS, 'online 1, 0.00025', **first)
    doubtful = {'rollout.num_groups': f'{GROUPS}|{10 * GROUPS}', 'batch.epochs': '1'}
    ten = plan.tables['last'] | {'where': doubtful, 'seeds': 10, 'curves': False}
    return plan._replace(tables=plan.tables | {'ten': ten})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
