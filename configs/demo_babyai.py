"""Turn-GRPO on two levels of BabyAI with the demo's small policy, two CPU cores.

  pip install minigrid==3.2.0
  python -m agentrl_jax.train --config=configs/demo_babyai.py --workdir=runs/babyai

GoToLocalS8N7 and PickupLoc have one room with eight objects. The instruction describes one of them
("pick up the red ball on your left"). An episode has up to five of AgentGym's actions ("go to red
ball 1") with short observations. The tokenizer is BabyAI's, and minigrid generates the levels that
are not in the package. Half of the cloned turns are from the expert, who knows the full room; the
other half are random legal actions. With MiniGrid's six actions the policy learns to go to an
object, but rarely to pick one up (experiments/LOG.md).

Hardware: one of two shared CPU cores.
Time: 25 to 30 minutes next to other work, more than half of them cloning.
Score: seeds 0 to 2: 46.1, 45.3 and 43.8 % of 256 held-out levels after cloning, 82.4, 73.0 and
82.0 % after 100 steps; random play, which only uses legal actions, 29 %, expert 97 %.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.steps = 100
    cfg.algorithm = 'turn_grpo'
    cfg.env.name = 'babyai'
    cfg.env.max_turns = 5
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 5
    cfg.env.train_levels = 9600
    cfg.env.eval_levels = 256
    cfg.babyai.levels = 'GoToLocalS8N7,PickupLoc'
    cfg.babyai.actions = 'macro'
    cfg.babyai.wording = 'brief'
    cfg.babyai.most_seen = 8

    cfg.rollout.max_tokens = 320
    cfg.rollout.max_response = 10
    cfg.batch.minibatch_rows = 64
    cfg.optim.lr = 3e-4
    cfg.batch.widths = 3
    cfg.filter.keep = 1.0
    cfg.loss.entropy_coef = 0.0

    cfg.clone.episodes = 16384
    cfg.clone.steps = 800
    cfg.clone.oracle = 0.5
    cfg.eval.every = 10
    return cfg
