"""ScalingInter-RL (arXiv:2509.08755) with the demo's small policy: episodes of 2, 3, then 5 turns.

  python -m agentrl_jax.train --config=configs/scaling_inter.py --workdir=runs/scaling_inter

FrozenLake with two moves per turn. GRPO as in the paper's code: all groups train, clip range .2, KL
loss .001 with k3, entropy bonus .001, equal weight for every episode. Validation always plays five
turns. A fixed horizon as baseline: --config.curriculum.rounds='()'. agentrl_jax/rl/curriculum.py
lists the stages of the paper's environments, 80 to 100 steps each.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: none with these settings. With its earlier settings, a filter of a quarter of the groups and
clip-higher, a run of 150 steps rose from 41 to 51 % of its validation maps, fixed 5 turns to 53 %
(one seed, experiments/LOG.md). The table of five seeds in experiments/scaling_inter has other
horizons and one move per turn.
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
    cfg.rollout.max_tokens = 168  # five turns of maximum length

    cfg.curriculum.rounds = (2, 3, 5)
    cfg.curriculum.stage_steps = 50
    return cfg
