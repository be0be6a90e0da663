"""StarPO-S on two levels of BabyAI with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_babyai.py --workdir=runs/babyai

GoToLocalS8N7 and PickupLoc: one room, eight objects, of which the instruction means one ("pick up
the red ball on your left"); up to four turns of four of MiniGrid's actions. The tokenizer is that
of BabyAI's words. The policy starts from cloning episodes in which seven turns of ten were played
at random.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: none; no run of it is in experiments/
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.steps = 120
    cfg.env.name = 'babyai'
    cfg.env.max_turns = 4
    cfg.env.max_actions_per_turn = 4
    cfg.env.max_actions_per_episode = 16
    cfg.env.train_levels = 2048
    cfg.env.eval_levels = 256
    cfg.babyai.levels = 'GoToLocalS8N7,PickupLoc'
    cfg.babyai.most_seen = 8

    cfg.rollout.max_tokens = 360
    cfg.rollout.max_response = 13
    cfg.eval.every = 20
    return cfg
