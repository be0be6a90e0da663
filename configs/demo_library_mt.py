"""configs/demo_library.py with MT-GRPO, its former algorithm: for old checkpoints.

  python -m agentrl_jax.train --config=configs/demo_library_mt.py --workdir=runs/library_mt

Hardware: 2 shared CPU cores, busy with other work.
Time: about 5 s per step.
Score: 94 % [92, 96] of 512 validation levels after 20 steps, 75 % after 5, seed 0; 29 % [25, 33]
after cloning.
"""

from configs import demo_library


def get_config():
    cfg = demo_library.get_config()
    cfg.algorithm = 'mt_grpo'
    cfg.turn_credit.outcome = 'answer'
    return cfg
