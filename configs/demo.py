"""The default agent of `make demo`: StarPO-S on FrozenLake, a small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/demo

Hardware: 2 shared CPU cores.
Time: 82 to 211 s for the 200 steps; 3 to 8 minutes with installing and cloning.
Score: 72.4 % [72.1, 73.0] of 512 validation maps, seeds 0 to 2 (experiments/demo/README.md); 35.4 %
after cloning, random play 23.3 %, oracle 100 %.
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
