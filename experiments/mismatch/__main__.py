"""Does training collapse if the sampler computes in bfloat16 and the trainer in float32?

Inference engines and trainers disagree on log-probabilities, which arXiv:2605.14220 blames for
collapses. Here the mismatch is one field (rollout.sampler_dtype), so four arms differ in nothing
else: float32 in both, a bfloat16 sampler with a float32 trainer, the same with truncated importance
sampling (loss.sampler_correction=tis), and bfloat16 in both, where they round equally.

tiny   FrozenLake from the start of experiments/lake_start.py with GRPO and without KL, 128 episodes
       a step, for 200 steps at 1e-3, four times the rate of most experiments. The card catalogue
       with configs/demo_library.py at 7.5e-4, three times its rate, for 40 steps.

Endpoint: success at the last three validations (mean). A run has collapsed if that is at most three
quarters of its best validation. Predicted before the first run: no run collapses; all arms are
within five points of float32; the largest gap of a step (sampler/logprob_gap) is above 0.01 with
the mismatch and below 0.005 in bfloat16, and grows during training.
"""

import sys

from experiments import common, lake_start

CONFIG = lake_start.CONFIG
ROWS = ('model.dtype', 'rollout.sampler_dtype', 'loss.sampler_correction')
ARMS = {
    'float32': {},
    'bfloat16 sampler': {'rollout.sampler_dtype': 'bfloat16'},
    'bfloat16 sampler, tis': {
        'rollout.sampler_dtype': 'bfloat16',
        'loss.sampler_correction': 'tis',
    },
    'bfloat16': {'model.dtype': 'bfloat16'},
}
LAKE = (
    lake_start.FEW
    | lake_start.CONSTANT
    | lake_start.BATCH
    | lake_start.PLAIN
    | {'algorithm': 'grpo', 'steps': 200, 'eval.every': 20, 'optim.lr': 1e-3}
)
LIBRARY = common.difference(CONFIG, 'configs/demo_library.py') | {
    'steps': 40,
    'eval.every': 4,
    'rollout.num_groups': 16,
    'batch.minibatch_rows': 64,
    'optim.lr': 7.5e-4,
}
WORLDS = {'lake': ('frozen_lake', LAKE), 'library': ('library', LIBRARY)}


def tiny():
    cells = [world | arm for _, world in WORLDS.values() for arm in ARMS.values()]
    tables = {
        name: {
            'rows': ','.join(ROWS),
            'where': {'env.name': world},
            'baseline': 'float32',
            'labels': common.labels(CONFIG, {x: fields | arm for x, arm in ARMS.items()}, ROWS),
            'at': 'last-three',
            'margin': 0.05,
            'signals': 'sampler/logprob_gap,policy/grad_norm,policy/entropy,sampler/outside',
        }
        for name, (world, fields) in WORLDS.items()
    }
    return common.Plan(CONFIG, tuple(cells), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
