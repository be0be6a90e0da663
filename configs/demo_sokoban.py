"""The demo's small policy on RAGEN's SimpleSokoban (6 x 6, one box, 10 actions).

python -m agentrl_jax.train --config=configs/demo_sokoban.py --workdir=runs/sokoban
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.env.name = 'sokoban'
    cfg.rollout.max_tokens = 128
    return cfg
