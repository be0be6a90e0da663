"""ScalingInter-RL (arXiv:2509.08755) with the demo's small policy: episodes of 2, 3, then 5 turns.

  python -m agentrl_jax.train --config=configs/scaling_inter.py --workdir=runs/scaling_inter

FrozenLake, two moves a turn. GRPO as the paper's code has it: all groups train, clip range .2, KL
loss .001 by k3, entropy bonus .001, every episode weighs the same. Validation plays all five turns
from the start. The fixed horizon to compare with: --config.curriculum.rounds='()'. Stages of the
paper's own environments, 80 to 100 steps each, are listed in agentrl_jax/rl/curriculum.py.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: none with these settings. With a filter of a quarter of the groups and clip-higher, which it
had before, a run of 150 steps rose from 41 to 51 % of its validation maps, fixed 5 turns to 53 %
(one seed, experiments/LOG.md). The table of five seeds in experiments/scaling_inter has other
horizons and one move a turn.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.algorithm = 'grpo'
    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.001
    cfg.critic.share_backbone = False
    cfg.env.max_turns = 5
    cfg.env.max_actions_per_turn = 2
    cfg.rollout.max_tokens = 168  # holds five turns at their longest

    cfg.curriculum.rounds = (2, 3, 5)
    cfg.curriculum.stage_steps = 50
    return cfg
