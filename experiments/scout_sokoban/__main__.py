"""Does RL add more to a short clone of a scout than more cloning, on Sokoban?

SCOUT (arXiv:2601.21754): Qwen2.5-0.5B solves 58 % of Sokoban rooms with one box after cloning a
scout and 98 % after multi-turn PPO. It prints no clone of equal cost.

tiny   RAGEN's SimpleSokoban, one action a turn, the policy of configs/scout_sokoban.py: 200 steps
       of cloning and 200 of PPO, and 1,500 steps of cloning, which take about as long. PPO's rate
       was tuned with seed 100 (59.8 -> 72.3 % at 2.5e-4, 73.8 % at 7e-4).

Predicted before the first run: PPO adds 10 to 17 points, and the longer clone is more than 12
points better than PPO.
"""

import sys

from experiments import common

CONFIG = 'configs/scout_sokoban.py'
RL = {
    'optim.lr': 7e-4,
    'optim.schedule': 'cosine',
    'optim.schedule_steps': 800,  # four per step
    'optim.final_lr': 0.05,
    'steps': 200,
    'eval.every': 50,
}
ARMS = {
    'short clone, RL': {'clone.steps': 200} | RL,
    'longer clone': {'clone.steps': 1500},
}
ROWS = ('clone.steps', 'steps')


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'short clone, RL',
        'labels': common.labels(CONFIG, ARMS, ROWS),
        'signals': 'rollout/success,policy/entropy',
    }
    return common.Plan(CONFIG, tuple(ARMS.values()), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
