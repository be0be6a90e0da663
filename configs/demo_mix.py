"""The demo's small policy on FrozenLake and SimpleSokoban at once, half of the groups each.

  python -m agentrl_jax.train --config=configs/demo_mix.py --workdir=runs/mix

GRPO on all groups: it compares episodes of a group alone, so the tenfold rewards of Sokoban weigh
no more than the lake's. For one world with as many episodes of it as here:
--config.env.mix='()' --config.env.name=sokoban --config.rollout.num_groups=16
--config.clone.episodes=12288.

Hardware: 2 CPU cores are enough.
Time: not recorded.
Score: none; no run of it is in experiments/.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.algorithm = 'grpo'
    cfg.env.mix = (('frozen_lake', 0.5), ('sokoban', 0.5))
    cfg.rollout.max_tokens = 128
    cfg.batch.minibatch_rows = 64
    cfg.batch.epochs = 1
    cfg.critic.share_backbone = False

    # As configs/demo_sokoban.py: fewer, and the policy does not read the room yet
    cfg.clone.episodes = 24576
    cfg.clone.steps = 1500
    cfg.clone.oracle = 0.5
    return cfg
