"""The demo's small policy on RAGEN's bandit: two named arms, one pull.

  python -m agentrl_jax.train --config=configs/demo_bandit.py --workdir=runs/bandit

A policy without pretraining cannot infer the risky arm from its name. It learns this for the pair
that it plays, and is validated on the same pair.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: 94.9 % [92.7, 96.5] of 512 episodes at step 60, seed 0; 40.0 % after cloning, random
play 50 %.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.steps = 60
    cfg.env.name = 'bandit'
    cfg.env.max_turns = 1
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 1
    cfg.bandit.pairs = 'one_pair'  # also for validation: the policy learns which arm pays
    cfg.rollout.max_tokens = 128
    cfg.clone.episodes = 1024
    cfg.clone.steps = 60
    cfg.clone.oracle = 0.0
    return cfg
