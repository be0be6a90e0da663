"""Which turn-level credit learns most per sampled token, and where does it matter?

benchmarks/turn_credit.md measures the bias and variance of these estimators where everything can be
enumerated. Here they train a network in three environments. The card catalogue has MT-GRPO v2's
rewards (arXiv:2505.11821): every lookup costs .1 times the lookups so far and only the card with
the answer pays, so that it matters when to stop. Sokoban pays during the episode, FrozenLake at its
end. All arms of a seed start from one clone and differ in credit only: clip range .2, token mean,
no KL, no entropy bonus, all groups train, and every step has the same number of episodes, optimiser
steps and passes. Turn PPO adds a value head to the policy.

Equal sampled tokens: an arm with longer episodes samples more per step. Each column is read at the
tokens of its shortest run, on each run's validation curve, linearly between two validations. No run
is stopped by tokens. The last step has its own table, as has the catalogue's return, which includes
lookup costs and is what its policies are trained for.

tiny   The demo's policy; 16 x 8 episodes, four optimiser steps on them, one pass. A run takes
       about 50 CPU-seconds and Sokoban's clone 170, on a busy machine. On Sokoban GRPO fell from 31
       to 20 % at a rate of 1e-3 and at 3e-4, where turn GRPO rose to 48 % (seed 100). RLOO also
       has one advantage an episode, but does not divide by the group's std. The catalogue's clone
       is mtgrpo_credit's: after 500 steps it did not read (8 %), and GRPO stopped looking up.

Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s.
"""

import sys

from experiments import common

CONFIG = 'configs/small.py'
ROWS = ('algorithm', 'turn_credit.mode')
SAME = {  # fields other than credit that the presets would set
    'loss.kl_coef': 0.0,
    'loss.clip_low': 0.2,
    'loss.clip_high': 0.2,
    'loss.entropy_coef': 0.0,
    'loss.aggregation': 'token_mean',
    'filter.rule': 'all',
}


def turns(mode):
    return {'algorithm': 'mt_grpo', 'turn_credit.mode': mode, 'turn_credit.outcome': 'answer'}


ARMS = {
    'GRPO': {'algorithm': 'grpo'},
    'RLOO': {'algorithm': 'rloo'},
    'MT-GRPO v1': turns('mt_v1'),
    'cumulative': turns('mt_cumulative'),
    'turn GRPO': {'algorithm': 'turn_grpo'},
    'GTPO': turns('gtpo'),
    'GiGPO': {'algorithm': 'gigpo'},
    'turn PPO': {'algorithm': 'ppo', 'loss.estimator': 'turn'},
    'vine': {  # also samples continuations: 48 episodes instead of 128, same number of minibatches
        'algorithm': 'vine',
        'rollout.num_groups': 12,
        'rollout.group_size': 4,
        'batch.minibatch_rows': 12,
        'batch.microbatch_rows': 12,
    },
}
EPISODES = {
    'rollout.num_groups': 16,
    'rollout.group_size': 8,
    'batch.minibatch_rows': 32,
    'batch.microbatch_rows': 32,
    'batch.epochs': 1,
    'optim.lr': 3e-4,
}
V2 = {  # rewards of MT-GRPO v2
    'library.tool_reward': 0.0,
    'library.presence_reward': 0.3,
    'library.answer_reward': 1.0,
    'library.lookup_cost': 0.1,
}
NAMES = {'library': 'catalogue', 'sokoban': 'Sokoban', 'frozen_lake': 'FrozenLake'}
OF_ALGORITHMS = ('algorithm', 'turn_credit', 'filter', 'loss')  # not taken from the configs


def world(path):
    """Return the fields of a config file that describe its environment, episodes and clone."""
    fields = common.difference(CONFIG, path)
    return {
        name: value for name, value in fields.items() if name.split('.')[0] not in OF_ALGORITHMS
    }


def tiny():
    worlds = {
        'library': world('configs/demo_library.py')
        | V2
        | {'steps': 40, 'eval.every': 10}
        | {'clone.episodes': 16384, 'clone.steps': 1600},
        'sokoban': world('configs/demo_sokoban.py')
        | {'steps': 30, 'eval.every': 10, 'loss.value_coef': 0.005, 'clone.steps': 1000},
        'frozen_lake': {'steps': 40, 'eval.every': 10, 'clone.steps': 500},
    }
    cells = tuple(
        arm | {'env.name': name} | more | EPISODES | SAME | arm  # the arm's fields take precedence
        for arm in ARMS.values()
        for name, more in worlds.items()
    )
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'at': 'equal-tokens',
        'baseline': 'GRPO',
        'clones': 'expert_clones',
        'labels': common.labels(CONFIG, ARMS, ROWS) | NAMES,
        'signals': 'policy/entropy,group/return_std',
    }
    catalogue = table | {
        'metric': 'eval/return',
        'where': {'env.name': 'library'},
        'also': 'eval/success,eval/tool_calls,eval/answer_presence,eval/valid_format',
    }
    tables = {
        'success': table | {'overall': True},
        'catalogue_return': catalogue,
        'last': table | {'at': 'last', 'overall': True, 'curves': False},
    }
    return common.Plan(CONFIG, cells, tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
