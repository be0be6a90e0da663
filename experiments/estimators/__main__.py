"""Does GRPO beat REINFORCE++, or dividing by the group's std beat another divisor?

AgentGym-RL (arXiv:2509.08755) finds GRPO far ahead of REINFORCE++ on BabyAI, TextCraft and
SearchQA. The two differ in the baseline of a return (its group or the batch) and in the divisor
(the std of its group or of all tokens of the batch). The four arms are GRPO, GRPO without its
division, REINFORCE++, and REINFORCE++ with the group's mean as baseline, which divides by the
batch's std. They share everything else: clip range .2, token mean, no KL, maps, episodes and
optimiser steps. Two rates are run, so that no arm looks good only because its steps are small.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 60
       steps of 16 groups of 8 episodes.

Endpoint: success at the last three validations (mean), for each arm at the better of its rates.
Predicted before the first run: GRPO minus REINFORCE++ is between -3 and +6 points at the better
rates. GRPO and REINFORCE++ with a baseline are within three points of each other. GRPO without the
division loses the most at the smaller rate and is within three points of GRPO at its better rate.
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
