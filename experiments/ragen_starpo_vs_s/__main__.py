"""Which part of StarPO-S keeps multi-turn PPO from collapsing: filter, clip-higher or no KL?

RAGEN (arXiv:2504.20073) trains PPO ("StarPO"), GRPO and StarPO-S on Bandit, Sokoban and FrozenLake
(Figs 5, 6, 9), and StarPO-S in parts (Figs 7, 8). Its filter runs also dropped the KL term, widened
the clip range, and made one update a step instead of four. Here each part is changed alone.
StarPO-S also runs without its filter, and PPO with the number of updates that the filter leaves.

tiny   Policies of configs/demo*.py, 100 steps, in which PPO collapses on Sokoban (seed 100); 60 on
       the Bandit. RAGEN's 8 x 16 episodes, minibatches of 32 and return at the last token; cloned
       on play that is half oracle (Sokoban) or 60 % (FrozenLake). Bandit starts at random play: it
       is a single choice, and a better start would reveal it.
0.5b   RAGEN's sizes on one accelerator. paper: the published setting, including Fig 7's other
       ratios, for Qwen2.5-0.5B-Instruct, without the paper's loss on observation tokens.

Tuning is on validation maps with seeds 100 and up, which no table uses:
  python -m experiments.ragen_starpo_vs_s --scale=tiny --first_seed=100 --seeds=2 \\
      --workdir=runs/tuning --config.clone.oracle=0.5
Published figures are read off the paper's vector graphics, in per cent.
"""

import sys

from experiments import common

ROWS = ('algorithm', 'filter.keep', 'loss.clip_high', 'loss.kl_coef', 'batch.minibatch_rows')
PPO = {  # vanilla StarPO: KL in the reward, all rollouts, symmetric clip range
    'algorithm': 'ppo',
    'filter.keep': 1.0,
    'loss.clip_high': 0.2,
    'loss.kl_coef': 0.001,
    'batch.minibatch_rows': 32,
    'loss.kl_in': 'reward',
    'loss.reward_on': 'episode',
}
FILTER, CLIP, NO_KL = {'filter.keep': 0.25}, {'loss.clip_high': 0.28}, {'loss.kl_coef': 0.0}
METHODS = {
    'PPO': PPO,
    'GRPO': PPO
    | {
        'algorithm': 'grpo',
        'loss.kl_in': 'loss',
        'loss.kl_estimator': 'k1',
        'loss.aggregation': 'token_mean',
        'loss.reward_on': 'turn',  # needs a critic: no effect here
    },
    'StarPO-S': PPO | FILTER | CLIP | NO_KL,
}
ALONE = {  # each differs from PPO in one field
    'PPO, filter alone': PPO | FILTER,
    'PPO, no KL alone': PPO | NO_KL,
    'PPO, clip-higher alone': PPO | CLIP,
    'PPO, fewer updates alone': PPO | {'batch.minibatch_rows': 128},
}
CONTROL = {'StarPO-S without filter': PPO | CLIP | NO_KL}  # Fig 7's missing curve
RATIOS = {
    f'StarPO-S, {100 * keep:.0f} % kept': PPO | CLIP | NO_KL | {'filter.keep': keep}
    for keep in (0.5, 0.75)
}
SIZES = {
    'rollout.num_groups': 8,
    'rollout.group_size': 16,
    'loss.entropy_coef': 0.001,
}
NAMES = {'bandit': 'Bandit', 'sokoban': 'Sokoban', 'frozen_lake': 'FrozenLake'}
AT_200 = {  # success after 200 steps
    'PPO': {'Bandit': '19.8 (Fig 5)', 'Sokoban': '0 (Fig 5)', 'FrozenLake': '0 (Fig 5)'},
    'GRPO': {'Bandit': '0 (Fig 5)', 'Sokoban': '0.4 (Fig 5)', 'FrozenLake': '21.1 (Fig 5)'},
    'StarPO-S': {
        'Bandit': '100.0 (Fig 9)',
        'Sokoban': '18.8 (Fig 9), 21.1 (Fig 7)',
        'FrozenLake': '20.3 (Fig 9), 23.1 (Fig 7)',
    },
    'PPO, no KL alone': {'Sokoban': '0 (Fig 8)', 'FrozenLake': '9.4 (Fig 8)'},
    'PPO, clip-higher alone': {'Sokoban': '0 (Fig 8)', 'FrozenLake': '0 (Fig 8)'},
    'StarPO-S, 50 % kept': {'Sokoban': '16.0 (Fig 7)', 'FrozenLake': '23.8 (Fig 7)'},
    'StarPO-S, 75 % kept': {'Sokoban': '18.8 (Fig 7)', 'FrozenLake': '7.4 (Fig 7)'},
}
PEAK = {  # best validation of each curve
    'PPO': {'Bandit': '74.8 (Fig 5)', 'Sokoban': '12.1 (Fig 5)', 'FrozenLake': '19.1 (Fig 5)'},
    'GRPO': {'Bandit': '19.1 (Fig 5)', 'Sokoban': '8.2 (Fig 5)', 'FrozenLake': '23.8 (Fig 5)'},
    'StarPO-S': {
        'Bandit': '100.0 (Fig 9)',
        'Sokoban': '21.1 (Fig 9), 23.4 (Fig 7)',
        'FrozenLake': '20.5 (Fig 9), 23.1 (Fig 7)',
    },
    'PPO, no KL alone': {'Sokoban': '10.9 (Fig 8)', 'FrozenLake': '21.1 (Fig 8)'},
    'PPO, clip-higher alone': {'Sokoban': '11.7 (Fig 8)', 'FrozenLake': '19.9 (Fig 8)'},
    'StarPO-S, 50 % kept': {'Sokoban': '19.1 (Fig 7)', 'FrozenLake': '25.0 (Fig 7)'},
    'StarPO-S, 75 % kept': {'Sokoban': '22.3 (Fig 7)', 'FrozenLake': '26.6 (Fig 7)'},
}


def plan(config, cells, worlds):
    """Return a plan of all cells in all environments, with tables `last` and `best`."""
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'baseline': 'PPO',
        'overall': True,
        'clones': 'expert_clones',
        'labels': common.labels(config, cells, ROWS) | NAMES,
        'signals': 'group/return_std,policy/entropy,policy/grad_norm',
    }
    tables = {
        'last': table | {'published': AT_200},
        'best': table | {'at': 'best-validation', 'published': PEAK, 'curves': False},
    }
    return common.Plan(config, common.cross(cells.values(), worlds), tables)


def tiny():
    more = SIZES | {'loss.entropy_coef': 0.005, 'steps': 100, 'eval.every': 20}
    worlds = [
        common.difference('configs/demo_cloned.py', 'configs/demo_bandit.py') | {'eval.every': 10},
        common.difference('configs/demo_cloned.py', 'configs/demo_sokoban.py'),
        {'env.name': 'frozen_lake', 'clone.oracle': 0.6},
    ]
    return plan(
        'configs/demo_cloned.py', METHODS | ALONE | CONTROL, [more | world for world in worlds]
    )


def published_worlds():
    """Return RAGEN's three environments, as differences of their configs from FrozenLake's."""
    files = [f'configs/{name}.py' for name in NAMES]
    fields = [common.difference('configs/frozen_lake.py', path) for path in files]
    return [SIZES | {'env.name': name} | more for name, more in zip(NAMES, fields, strict=True)]


def half_billion():
    return plan('configs/frozen_lake.py', METHODS | ALONE | CONTROL, published_worlds())


def paper():
    more = {'steps': 200, 'eval.every': 10, 'batch.microbatch_rows': 4}
    worlds = [world | more for world in published_worlds()]
    return plan('configs/frozen_lake.py', METHODS | ALONE | CONTROL | RATIOS, worlds)


SCALES = {'tiny': tiny, '0.5b': half_billion, 'paper': paper}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
