"""The demo's small policy on FrozenLake and SimpleSokoban at once, half of the groups each.

  python -m agentrl_jax.train --config=configs/demo_mix.py --workdir=runs/mix

GRPO trains on all groups, without dividing by a group's deviation: with it, Sokoban is not learned
(experiments/turn_credit). For one environment with the same number of its episodes:
--config.env.mix='()' --config.env.name=sokoban --config.rollout.num_groups=16
--config.clone.episodes=12288.

Hardware: one of two shared CPU cores.
Time: 7 minutes, more than half of them cloning.
Score: 512 validation levels each, seeds 0 to 2: FrozenLake 39.1, 38.7, 48.4 % after cloning and
65.0, 65.0, 77.0 % after 100 steps (random play 23 %, oracle 100 %); Sokoban 21.5, 25.4, 26.2 %
and 34.2, 36.9, 41.6 % (13 % and 99 %). Alone, with equally many episodes: Sokoban, seeds 0, 1,
32.8, 35.0 % and 42.8, 45.1 %; FrozenLake, seeds 0 and 2, 52.1, 55.5 % and 78.3, 83.6 %.
With the division, seed 0, 200 steps: 71.5 % of the lakes, 24.2 % of the rooms.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.optim.lr = 1e-3
    cfg.steps = 100
    cfg.algorithm = 'grpo'
    cfg.loss.norm = 'none'
    cfg.env.mix = (('frozen_lake', 0.5), ('sokoban', 0.5))
    cfg.rollout.max_tokens = 128
    cfg.batch.minibatch_rows = 64
    cfg.batch.epochs = 1
    cfg.critic.share_backbone = False

    # As in configs/demo_sokoban.py: with fewer steps, the policy does not learn to read rooms
    cfg.clone.episodes = 24576
    cfg.clone.steps = 1500
    cfg.clone.oracle = 0.5
    return cfg
