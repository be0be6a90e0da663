"""Turn GRPO on the card catalogue with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_library.py --workdir=runs/library

One to three lookups, then the answer; a guess is right one time in sixteen. The policy starts from
cloning episodes in which two turns of five were played at random: it reads cards and speaks the
format, but often goes astray or answers too early.

Hardware: 2 shared CPU cores, busy with other work.
Time: 6 s a step; 11 s in one of three runs, when other work was heavier.
Score: 97 % [95, 98], 81 % [78, 85] and 96 % [94, 97] of 512 validation levels after 30 steps, 96,
70 and 90 % after 20, 78, 47 and 37 % after 5, seeds 0, 1 and 2; 29, 19 and 17 % after cloning.

A policy that may stop is credited by turn_grpo: without bias there, and where more than two turns
pay with the least variance of a sampled turn, or nearly (benchmarks/turn_credit.md).
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.steps = 30
    cfg.algorithm = 'turn_grpo'
    cfg.env.name = 'library'
    cfg.env.max_turns = 5
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 5
    cfg.env.format_penalty = -0.2

    cfg.rollout.max_tokens = 176
    cfg.rollout.max_response = 8

    cfg.filter.keep = 1.0
    cfg.loss.clip_high = 0.2
    cfg.loss.entropy_coef = 0.0
    cfg.batch.minibatch_rows = 128
    cfg.batch.microbatch_rows = 64

    cfg.clone.steps = 350
    cfg.clone.oracle = 0.6
    cfg.eval.every = 5
    return cfg
