"""StarPO-S from a deliberately weak clone: the setting of the older experiments.

  python -m agentrl_jax.train --config=configs/demo_cloned.py --workdir=runs/demo_cloned

Seven of ten cloned turns are random, so the policy knows the format but plays badly. At this
learning rate StarPO-S ends at 72 % from any start: a clone of clean play starts at 82 % and loses 8
points (experiments/clean_start). configs/demo.py needs no demonstrations. Other configs of small
policies start from this one.

Hardware: 2 shared CPU cores.
Time: 199 to 250 s for the 200 steps, 6 to 8 minutes with cloning, two runs at a time.
Score: 72.4 % [72.1, 73.0] of 512 validation maps, seeds 0 to 2 (experiments/demo_cloned/README.md);
35.4 % after cloning, random play 23.3 %, oracle 100 %.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.optim.lr = 1e-3
    # Enough to learn maps and the format; most demonstrations are random play
    cfg.clone.episodes = 8192
    cfg.clone.steps = 700
    cfg.clone.oracle = 0.3

    # StarPO-S: the quarter of groups with the most varied returns, no KL, clip-higher, critic
    cfg.filter.keep = 0.25
    cfg.loss.clip_high = 0.28
    cfg.loss.entropy_coef = 0.005
    cfg.batch.minibatch_rows = 32
    return cfg
