"""Scouts in place of experts: what does each stage add, and does RL add more than a longer clone?

SCOUT (arXiv:2601.21754) clones a small network that explored without language, then trains with
PPO: Qwen2.5-0.5B gets from 39 to 93 % on dry FrozenLake and from 24 to 88 % on slippery one. It
prints no random play, no oracle, no seeds and no clone of equal cost.

tiny   FrozenLake with the policy of configs/demo.py: dry with up to four actions a turn, planned
       blind, and SCOUT's slippery one (four of five moves go where they should), one action a turn.
       A scout trains for 2.0 M actions, about 60 CPU-seconds. Its clone takes 800 steps, then PPO
       150; `longer clone` spends the cost of PPO on 2,000 more steps of cloning. The expert's arms
       have the same clones without the cost of a scout.

Predicted before the first run, after one run of `scout, clone, RL` with seed 10 on the dry lake
(84 -> 88 %): there PPO adds 2 to 6 points to a clone, and the longer clone is 1 to 5 points better
than PPO. The expert's clone is 3 to 8 points better than the scout's, which has no rule for ties.
On the slippery lake the expert plans as if nothing slipped, so the scout's clone is 2 points better
than its clone or more; PPO adds less than 2 points to either.
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
LAKES = {
    'dry': {'frozen_lake.success_rate': 1.0},
    'slippery': {
        'frozen_lake.success_rate': 0.8,
        'env.max_turns': 10,
        'env.max_actions_per_turn': 1,
        'context.window': 1,
        'clone.batch': 256,  # turns
        'rollout.num_groups': 16,
        'rollout.max_tokens': 320,
        'rollout.max_response': 3,  # an action, the closing tag and the end
    },
}
ROWS = ('clone.expert', 'steps')


def tiny():
    tables = {
        name: {
            'rows': ','.join(ROWS),
            'baseline': 'scout, clone, RL',
            'where': {'frozen_lake.success_rate': str(lake['frozen_lake.success_rate'])},
            'labels': common.labels(CONFIG, ARMS, ROWS),
            'signals': 'rollout/success,policy/entropy',
        }
        for name, lake in LAKES.items()
    }
    cells = [lake | arm for lake in LAKES.values() for arm in ARMS.values()]
    return common.Plan(CONFIG, tuple(cells), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
