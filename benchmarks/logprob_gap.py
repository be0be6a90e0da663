"""Gap of log-probabilities between sampler and trainer, in six rollouts of a config.

  python -m benchmarks.logprob_gap --config=configs/demo.py --config.model.dtype=bfloat16

Each rollout has other random weights, unless model.path is set.
"""

import jax
import numpy as np
from absl import app
from ml_collections import config_flags

from agentrl_jax.run.build import build

CONFIG = config_flags.DEFINE_config_file('config')


def main(_) -> None:
    run = build(CONFIG.value)
    training, policy = run.training, run.params
    for key in map(jax.random.key, range(6)):
        if not run.config.model.path:
            policy = run.model.init(jax.random.fold_in(key, 1))
        out, _ = training.collects[0](policy, training.tasks[0], *training.draw(key, 0), key)
        gap = np.abs(training.rescore(policy, out) - out.logprobs)[np.asarray(out.action_mask)]
        large = (gap > 1e-5).sum()
        print(f'{gap.size} tokens: mean {gap.mean():.1e}, max {gap.max():.1e}, >1e-5: {large}')


if __name__ == '__main__':
    app.run(main)
