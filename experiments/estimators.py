"""Does GRPO beat REINFORCE++, or a division by the std of a group another one?

AgentGym-RL (arXiv:2509.08755) finds GRPO far ahead of REINFORCE++ on BabyAI, TextCraft and
SearchQA. The two differ in what a return is compared with (its group, or the batch) and in what it
is divided by (the std of its group, or of all tokens of the batch). Here are all four of these:
GRPO, GRPO without its division, REINFORCE++, and REINFORCE++ with the group's mean as baseline,
which divides by the batch's std. Nothing else differs: clip range .2, token mean, no KL, the same
maps, episodes and optimiser steps. At two rates, so that none is good only because its steps are
small.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 60
       steps of 16 groups of 8 episodes.

Endpoint: success at the last three validations (mean), for each arm at the better of its rates.
Predicted before the first run: GRPO less REINFORCE++ is between -3 and +6 points at the better
rates, GRPO and REINFORCE++ with a baseline are within three points of each other, GRPO without the
division loses most of the four by the smaller rate and is within three points of GRPO at its better
one.
"""

import sys

from experiments import common, lake_start

ROWS = ('algorithm', 'loss.norm', 'optim.lr')
ARMS = {
    'GRPO': {'algorithm': 'grpo'},
    'GRPO, mean alone': {'algorithm': 'grpo', 'loss.norm': 'mean'},
    'REINFORCE++': {'algorithm': 'reinforce_pp'},
    'REINFORCE++, baseline': {'algorithm': 'reinforce_pp_baseline'},
}
CELLS = {
    f'{name}, {rate:g}': lake_start.PLAIN | arm | {'optim.lr': rate}
    for name, arm in ARMS.items()
    for rate in lake_start.RATES
}


def tiny():
    more = {'steps': 60, 'eval.every': 10}
    return lake_start.plan(CELLS, more, ROWS, 'REINFORCE++, 0.00025')


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
