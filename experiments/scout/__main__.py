"""Scouts in place of experts: what does each stage add, and does RL add more than a longer clone?

SCOUT (arXiv:2601.21754) clones a small network that explored without language, then trains with
PPO: Qwen2.5-0.5B reaches 93 % on dry FrozenLake, 89 % before PPO and 39 % with PPO alone. It prints
no random play, no oracle, no seeds and no clone of equal cost.

tiny   Dry FrozenLake with the policy of configs/demo.py, up to four actions a turn planned blind. A
       scout trains for 2.0 M actions, about 60 CPU-seconds. Its clone takes 800 steps, then PPO
       150; `longer clone` spends about its cost on 2,000 more steps of cloning. The expert's arms
       have the same clones without the cost of a scout.

Predicted before the first run, after one run of `scout, clone, RL` with seed 10 (84 -> 88 %): PPO
adds 2 to 6 points to a clone, and the longer clone is 1 to 5 points better than PPO. The expert's
clone is 3 to 8 points better than the scout's, which has no rule for ties.
"""

import sys

from experiments import common

CONFIG = 'configs/demo_scout.py'
SCOUT, EXPERT = {'clone.expert': 'scout'}, {'clone.expert': 'world'}
RL, LONGER = {'clone.steps': 800, 'steps': 150}, {'clone.steps': 2800, 'steps': 0}
ARMS = {
    'scout, clone, RL': SCOUT | RL,
    'scout, longer clone': SCOUT | LONGER,
    'expert, clone, RL': EXPERT | RL,
    'expert, longer clone': EXPERT | LONGER,
}
ROWS = ('clone.expert', 'steps')


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'scout, clone, RL',
        'labels': common.labels(CONFIG, ARMS, ROWS),
        'signals': 'rollout/success,policy/entropy',
    }
    return common.Plan(CONFIG, tuple(ARMS.values()), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
