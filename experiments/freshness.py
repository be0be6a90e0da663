"""Are fresh rollouts better, or are fewer updates smaller?

RAGEN (arXiv:2504.20073, Fig 10, Online-k) plays k times as many episodes at once, keeps the quarter
of the groups that varies most and makes k updates of them: as many updates and as many episodes for
every k, only how old the policy of an episode is differs. Beside it `reuse` plays as many episodes
for every k and passes k times over them. Each at two rates, of which the smaller one makes what is
old less old.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 120
       updates of 32 rows, which cost 15,360 episodes (online) and 15,360 / k (reuse).

Endpoint: success at the last three validations (mean). Predicted before the first run: at 2.5e-4
online k = 1, 2, 5, 10 are within five points of one another, at 1e-3 k = 10 is below k = 1 by more;
reuse is below online at k = 10 and 1e-3, and for its episodes no worse at 2.5e-4.

Second stage, since three seeds could not tell: online k = 1 and 10 at both rates with ten seeds.
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
