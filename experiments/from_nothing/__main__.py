"""How far does RL get from random weights, and does it beat cloning at equal compute?

Three arms cost about the same (seconds of one core, without compiling and validation). `nothing` is
RL from random weights without demonstrations, restricted to legal answers (rollout.constrain).
`clone` spends all of it on cloning clean play of the expert; `clone, then RL` spends half on each.
All are validated under the same grammar.

tiny   FrozenLake with the policy of configs/demo.py, 450 steps of RL at .65 s or 2,500 of cloning
       at .12 s of a core. The setting was tuned with seed 100.
"""

import sys

from experiments import common

RL_STEPS, CLONE_STEPS = 450, 2500
EXPERT = {'clone.episodes': 16384, 'clone.oracle': 1.0, 'clone.lr': 4e-3}
CALM = {  # the rate that random weights need would destroy a clone
    'optim.lr': 2.5e-4,
    'optim.schedule_steps': 2 * RL_STEPS,
    'loss.entropy_coef': 0.0,
}
ARMS = {
    'nothing': {'clone.episodes': 0, 'steps': RL_STEPS},
    'clone': EXPERT | {'clone.steps': CLONE_STEPS, 'steps': 0},
    'clone, then RL': EXPERT | CALM | {'clone.steps': CLONE_STEPS // 2, 'steps': RL_STEPS // 2},
}
ROWS = ('clone.episodes', 'steps')


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'clone',
        'labels': common.labels('configs/demo.py', ARMS, ROWS),
        'signals': 'rollout/success,policy/entropy',
    }
    return common.Plan('configs/demo.py', tuple(ARMS.values()), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
