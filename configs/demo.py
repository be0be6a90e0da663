"""The default agent of `make demo`: StarPO-S on FrozenLake, a small policy, two CPU cores.

make demo        or: python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/demo
"""

from configs import small


def get_config():
    cfg = small.get_config()
    # StarPO-S: the quarter of the groups whose returns vary most, no KL, clip-higher, critic
    cfg.filter.keep = 0.25
    cfg.loss.clip_high = 0.28
    cfg.loss.entropy_coef = 0.005
    cfg.batch.minibatch_rows = 32
    return cfg
