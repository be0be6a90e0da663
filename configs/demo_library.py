"""MT-GRPO on the card catalogue with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_library.py --workdir=runs/library

One to three lookups, then the answer; a guess is right one time in sixteen. The policy starts from
cloning episodes in which two turns of five were played at random: it reads cards and speaks the
format, but often goes astray or answers too early.

Hardware: 2 shared CPU cores, busy with other work.
Time: about 5 s a step.
Score: 94 % [92, 96] of 512 validation levels after 20 steps, 75 % after 5, seed 0; 29 % [25, 33]
after cloning.
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.steps = 30
    cfg.algorithm = 'mt_grpo'
    cfg.turn_credit.outcome = 'answer'
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
