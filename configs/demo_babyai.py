"""Turn-GRPO on two levels of BabyAI with the demo's small policy, two CPU cores.

  pip install minigrid==3.2.0
  python -m agentrl_jax.train --config=configs/demo_babyai.py --workdir=runs/babyai

GoToLocalS8N7 and PickupLoc: one room, eight objects, of which the instruction means one ("pick up
the red ball on your left"); up to eight turns of two of MiniGrid's actions. The tokenizer is that
of BabyAI's words. The policy starts from cloning episodes in which three turns of ten were played
at random. Of 2,048 levels it learns many by heart (39 % on those, 20 % on others), hence more of
them, which minigrid draws.

Hardware: one of two shared CPU cores.
Time: 19 minutes of cloning, and 13 for 170 steps.
Score: 33.2 % of 256 held-out levels after 170 steps, 22.3 % after cloning, random play 7 %, expert
100 %; one run, seed 100, with which it was tuned (experiments/LOG.md). Going to an object is
learned (half of the levels), picking one up hardly.
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.steps = 200
    cfg.algorithm = 'turn_grpo'
    cfg.env.name = 'babyai'
    cfg.env.max_turns = 8
    cfg.env.max_actions_per_turn = 2
    cfg.env.max_actions_per_episode = 16
    cfg.env.train_levels = 9600
    cfg.env.eval_levels = 256
    cfg.babyai.levels = 'GoToLocalS8N7,PickupLoc'
    cfg.babyai.most_seen = 8

    cfg.rollout.max_tokens = 320
    cfg.rollout.max_response = 9
    cfg.optim.lr = 2e-4
    cfg.batch.minibatch_rows = 128
    cfg.filter.keep = 1.0
    cfg.loss.entropy_coef = 0.0

    cfg.clone.episodes = 32768
    cfg.clone.steps = 1500
    cfg.clone.oracle = 0.7
    cfg.eval.every = 10
    return cfg
