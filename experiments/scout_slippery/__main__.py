"""Does RL add more to a clone of a scout than more cloning, on ice where moves slip?

SCOUT (arXiv:2601.21754): Qwen2.5-0.5B solves 46 % of slippery FrozenLake after cloning a scout and
88 % after multi-turn PPO. It prints no random play, no oracle and no clone of equal cost.

tiny   Its lake (4 x 4, nine of ten cells ice, two moves in ten go to a side) with 10 actions
       instead of 25, one a turn, the policy of configs/scout_sokoban.py and 32,768 maps: 200 steps
       of cloning and 200 of PPO, and 1,500 steps of cloning. PPO's rate was chosen with seed 100
       (100 steps: 82.0 -> 86.9 % at 7e-4, 86.1 % at 2.5e-4). Random play solves 23.3 %, the oracle
       94.0 %, the scout of seed 100 92.8 %.

Predicted before the first run: PPO adds 4 to 8 points, and the longer clone is 1 to 5 points better
than PPO: slips lead the scout to many states, so its clone sees the mistakes that it must repair.
"""

import sys

from experiments import common
from experiments.scout_sokoban import __main__ as sokoban

CONFIG = sokoban.CONFIG
LAKE = {
    'env.name': 'frozen_lake',
    'frozen_lake.success_rate': 0.8,
    'loss.value_coef': 0.5,  # returns of 1, not of 10
}
ARMS = {name: LAKE | arm for name, arm in sokoban.ARMS.items()}


def tiny():
    table = {
        'rows': ','.join(sokoban.ROWS),
        'baseline': 'short clone, RL',
        'labels': common.labels(CONFIG, ARMS, sokoban.ROWS),
        'signals': 'rollout/success,policy/entropy',
    }
    return common.Plan(CONFIG, tuple(ARMS.values()), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
