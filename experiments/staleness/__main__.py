"""How much does it cost to train on episodes that older weights started?

With rollout.staleness=s a step does not wait for the longest episode: free rows start episodes of
the next s steps, which continue under new weights. Every cell has the same number of episodes,
steps and updates, and the same levels at each step; only the sampling weights differ. Each cell
runs at two rates, because s updates move the policy s times as far at a larger one. The largest
staleness also runs with advantages weighted by trainer / sampler (loss.sampler_correction=tis), in
addition to the loss's own ratio to the sampling weights.

tiny   Environment, policy and clone of configs/demo_search.py with GRPO's clip, 60 steps of 128
       episodes, with one row per episode.

Endpoint: success at the last three validations (mean). Predicted before the first run: at 1e-4 no
staleness is more than five points from none, with either correction; at 4e-4 staleness 1 and 2 stay
within five points, 4 loses five to fifteen, and tis wins back less than half of that. The mean
staleness of turns (rollout/staleness) is below half of s, since an episode has three turns.
"""

import sys

from experiments import common

CONFIG = 'configs/demo_search.py'
ROWS = ('rollout.staleness', 'loss.sampler_correction', 'optim.lr')
RATES = (1e-4, 4e-4)
CELLS = {
    f'{staleness} {correction}, {rate:g}': {
        'rollout.staleness': staleness,
        'loss.sampler_correction': correction,
        'optim.lr': rate,
    }
    for rate in RATES
    for staleness, correction in [(0, 'off'), (1, 'off'), (2, 'off'), (4, 'off'), (4, 'tis')]
}
SAME = {
    'algorithm': 'grpo',
    'steps': 60,
    'eval.every': 5,
    'loss.kl_coef': 0.0,
    'filter.rule': 'all',
}


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'labels': common.labels(CONFIG, {name: SAME | cell for name, cell in CELLS.items()}, ROWS),
        'at': 'last-three',
        'clones': 'expert_clones',
        'margin': 0.05,
        'signals': 'policy/kl_old_k3,policy/entropy,policy/clip_frac_high',
    }
    tables = {}
    for name, rate in zip(('slow', 'fast'), RATES, strict=True):
        one = table | {'baseline': f'0 off, {rate:g}', 'where': {'optim.lr': f'{rate:g}'}}
        tables |= {name: one, f'{name}_area': one | {'at': 'area', 'curves': False}}
    return common.Plan(CONFIG, tuple(SAME | cell for cell in CELLS.values()), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
