"""How many passes over a rollout can a loss take?

A second pass costs no episode, but the policy is no longer the one that played. The losses treat
these tokens differently. The clip of PPO and GRPO removes the gradient of tokens that have already
moved in the intended direction. CISPO bounds their weight and keeps the gradient, DPPO drops a
token by its probability, SAPO fades it out, and SAO drops it when it is far from the sampler on
either side. All cells have the same episodes, steps and sampled tokens; only the passes and the
updates per rollout differ. The smaller of the two rates keeps the policy closer to the old one.

tiny   FrozenLake under the grammar from a few clean demonstrations (experiments/lake_start.py), 40
       steps of 128 episodes in minibatches of 32. All losses are token means without KL. PPO and
       SAO have a value head; the other losses compare groups of 16.

Endpoint: success at the last three validations (mean). Predicted before the first run: at 2.5e-4
more passes help every loss up to 4, and none falls by more than five points from there to 16. At
1e-3 sixteen passes are worse than two by more than ten points for CISPO and SAO, whose gradients
continue, and by less for PPO and GRPO; DPPO and SAPO are in between. With one pass no two losses
differ by more than five points.
"""

import sys

from experiments import common, lake_start

ROWS = ('algorithm', 'batch.epochs', 'optim.lr')
PASSES = (1, 2, 4, 8, 16)
STEPS, GROUPS = 40, 8
LOSSES = {
    'PPO': 'ppo',
    'GRPO': 'grpo',
    'CISPO': 'cispo',
    'DPPO': 'dppo',
    'SAPO': 'sapo',
    'SAO': 'sao',
}
SAME = {  # fields other than the loss that the presets would set
    'loss.kl_coef': 0.0,
    'loss.aggregation': 'token_mean',
    'filter.rule': 'all',
}
CELLS = {
    f'{name}, {passes}, {rate:g}': {
        'algorithm': algorithm,
        'batch.epochs': passes,
        'optim.lr': rate,
    }
    for rate in lake_start.RATES
    for name, algorithm in LOSSES.items()
    for passes in PASSES
}


def tiny():
    more = SAME | {
        'steps': STEPS,
        'eval.every': STEPS // lake_start.EVALUATIONS,
        'rollout.num_groups': GROUPS,
        'rollout.group_size': lake_start.EPISODES // GROUPS,
    }
    plan = lake_start.plan(CELLS, more, ROWS, '', signals='policy/kl_old_k3,policy/clip_frac_high')
    # Each loss is compared with itself: rows are passes, columns losses, and a table per rate
    table = plan.tables['last'] | {
        'rows': 'batch.epochs',
        'cols': 'algorithm',
        'baseline': '1 pass',
        'labels': {str(n): f'{n} pass{"es" * (n > 1)}' for n in PASSES}
        | {algorithm: name for name, algorithm in LOSSES.items()},
    }
    tables = {}
    for name, rate in zip(('fast', 'slow'), lake_start.RATES, strict=True):
        one = table | {'where': {'optim.lr': f'{rate:g}'}}
        tables |= {name: one, f'{name}_area': one | {'at': 'area', 'curves': False}}
    return plan._replace(tables=tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
