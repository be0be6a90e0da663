"""The demo's small policy on RAGEN's SimpleSokoban (6 x 6, one box, 10 actions).

  python -m agentrl_jax.train --config=configs/demo_sokoban.py --workdir=runs/sokoban

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: 49.6 % of 512 validation rooms at step 200, 55.3 % at step 25, seed 100, with which it was
tuned (experiments/LOG.md); 36.9 % after cloning, random play 13.5 %, oracle 98.8 %.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.env.name = 'sokoban'
    cfg.rollout.max_tokens = 128

    # More to imitate than for the lake: after 700 steps the policy does not read the room yet
    cfg.clone.episodes = 16384
    cfg.clone.steps = 1500
    cfg.clone.oracle = 0.5

    # Returns are ten times the lake's and the loss of the values a hundred times: with the lake's
    # 0.5 little but its gradient is left of the clipped one, and the policy forgets to speak.
    cfg.loss.value_coef = 0.005
    return cfg
