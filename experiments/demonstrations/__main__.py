"""Cloning, AgentEvol or RL: which gets the most out of the same demonstrations?

AgentGym (arXiv:2406.04151) trains AgentEvol on the policy's own successes together with the
demonstrations. It beats a clone of the demonstrations in 8 of 11 tasks, and loses to a clone of
more data in 3. AgentGym-RL uses RL instead. Here an expert provides 256 or 1,024 episodes once.
Four methods start from them at about equal cost: `clone` trains on them alone, the other three
clone briefly and then play. PPO and GRPO never use them again. AgentEvol takes a fifth of its rows
from them and restarts from the clone three times (in the paper, from the previous model).

tiny   FrozenLake, policy and costs of experiments/beyond_clone: 1,500 steps of cloning, or 150
       and 200 steps of 256 episodes; any token may be sampled. Rates were tuned with seed 100 and
       256 demonstrations over 2.5e-4, 5e-4 and 1e-3 (GRPO 70.8, 73.6, 73.5 %, AgentEvol 57.6,
       59.4, 54.7; the rate of PPO is from beyond_clone).

Endpoint: success at the last three validations (mean). Predicted before the tables' first run: with
256 demonstrations PPO and GRPO are more than ten points above the clone and within five of each
other, and AgentEvol is in between. With 1,024 the clone is within five points of the best, and
AgentEvol is above it by less than five.
"""

import sys

from experiments import common
from experiments.beyond_clone.__main__ import FEW

CONFIG = 'configs/demo.py'
ROWS = ('algorithm', 'clone.steps')
COLUMNS = (256, 1024)
FREE = {'rollout.constrain': ''}  # base demonstrations exclude a grammar
RL = {'clone.steps': 150, 'steps': 200, 'optim.schedule_steps': 800, 'eval.every': 25}
SHORT = {  # PPO's values here, instead of GRPO's preset
    'loss.kl_coef': 0.0,
    'loss.clip_low': 0.2,
    'loss.clip_high': 0.2,
    'loss.aggregation': 'token_mean',
    'filter.rule': 'all',
}
EVOL = {'evol.iteration': 50, 'evol.base_rows': 64, 'loss.entropy_coef': 0.0}
METHODS = {
    'clone': {'clone.steps': 1500, 'steps': 0},
    'PPO': RL | {'optim.lr': 5e-4},
    'GRPO': RL | SHORT | {'algorithm': 'grpo', 'optim.lr': 5e-4},
    'AgentEvol': RL | EVOL | {'algorithm': 'agent_evol', 'optim.lr': 5e-4},
}


def tiny():
    numbers = ({'clone.episodes': number} for number in COLUMNS)
    cells = [FEW | FREE | method | number for number in numbers for method in METHODS.values()]
    table = {
        'rows': ','.join(ROWS),
        'cols': 'clone.episodes',
        'baseline': 'clone',
        'labels': common.labels(CONFIG, METHODS, ROWS)
        | {str(number): f'{number:,} episodes' for number in COLUMNS},
        'at': 'last-three',
        'margin': 0.05,
        'clones': 'from_nothing',
    }
    return common.Plan(CONFIG, tuple(cells), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
