"""Default config of `python -m benchmarks.step`: PPO with a critic, 32 episodes.

The policy has the size of the other benchmarks (4 layers, hidden size 256) and the vocabulary of
the bundled tokenizer. Its weights are random, so nearly every answer uses all of its 16 tokens.
"""

from benchmarks.common import SHAPE
from configs import base


def get_config():
    cfg = base.get_config()
    cfg.env.prompt = 'brief'
    cfg.env.max_turns = 4
    cfg.env.train_levels = 64
    cfg.env.eval_levels = 16
    for name, size in SHAPE.items():
        cfg.model[name] = size
    cfg.rollout.num_groups = 8
    cfg.rollout.group_size = 4
    cfg.rollout.max_tokens = 152
    cfg.rollout.max_response = 16
    cfg.batch.minibatch_rows = 16
    cfg.batch.microbatch_rows = 4
    return cfg
