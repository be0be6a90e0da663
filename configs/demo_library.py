"""Turn GRPO on the card catalogue with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_library.py --workdir=runs/library

An episode needs one to three lookups, then the answer; one of sixteen guesses is right. The policy
starts from cloned episodes in which two of five turns are random: it reads cards and knows the
format, but often gets lost or answers too early.

Hardware: 2 shared CPU cores, busy with other work.
Time: 6 s per step; 11 s in one of three runs, when other work was heavier.
Score: 97 % [95, 98], 81 % [78, 85] and 96 % [94, 97] of 512 validation levels after 30 steps, 96,
70 and 90 % after 20, 78, 47 and 37 % after 5, seeds 0, 1 and 2; 29, 19 and 17 % after cloning.

The algorithm is turn_grpo, since its credit is unbiased if a policy may stop. If more than two
turns pay, its variance per sampled turn is the lowest or close to it (benchmarks/turn_credit.md).
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
