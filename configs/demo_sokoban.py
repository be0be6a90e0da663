"""The demo's small policy on RAGEN's SimpleSokoban (6 x 6, one box, 10 actions).

  python -m agentrl_jax.train --config=configs/demo_sokoban.py --workdir=runs/sokoban

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: 49.6 % of 512 validation rooms at step 200, 55.3 % at step 25, seed 100, which was also used
for tuning (experiments/LOG.md); 36.9 % after cloning, random play 13.5 %, oracle 98.8 %.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.env.name = 'sokoban'
    cfg.rollout.max_tokens = 128

    # More cloning than for FrozenLake: after 700 steps, the policy does not read rooms yet
    cfg.clone.episodes = 16384
    cfg.clone.steps = 1500
    cfg.clone.oracle = 0.5

    # Returns are ten times FrozenLake's, and the value loss is a hundred times larger. With its 0.5
    # the value loss dominates the clipped gradient, and the policy forgets the format.
    cfg.loss.value_coef = 0.005
    return cfg
