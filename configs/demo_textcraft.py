"""StarPO-S on TextCraft over HTTP with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_textcraft.py --workdir=runs/textcraft

The run starts a server of AgentGym's protocol for itself. Its goals are one or two crafts deep and
need at most three recipes and four commands: 176 to train on, 21 held out, each in 32 variants that
show it beside another recipe. What makes them readable for a small model: a system message of one
sentence, replies that name things as they are typed, 'Action: ' forced in front of each answer, and
a tokenizer in which each word of a name is a token. The policy starts from cloning episodes of five
turns of which two are the planner's and three random: it speaks in commands that are shown, but
seldom in the right order.

Hardware: 2 shared CPU cores.
Time: not recorded.
Score: none; no run of it is in experiments/. Random play 12 %, planner 100 % (five turns).
"""

from configs import demo


def get_config():
    cfg = demo.get_config()
    cfg.steps = 120
    cfg.env.name = 'textcraft'
    cfg.env.max_turns = 5
    cfg.env.train_levels = 8192
    cfg.env.eval_levels = 256
    cfg.textcraft.launch = 1
    cfg.textcraft.room = 256
    cfg.textcraft.prompt = 'short'
    cfg.textcraft.wording = 'drawn'
    cfg.textcraft.distractors = 1
    cfg.textcraft.depths = (1, 2)
    cfg.textcraft.most_recipes = 3
    cfg.textcraft.most_commands = 4
    cfg.textcraft.variants = 32
    cfg.hosts.answer_prefix = 'Action: '
    cfg.hosts.max_observation = 80
    cfg.hosts.read_tokens = 16

    cfg.algorithm = 'turn_grpo'
    cfg.env.format_penalty = 0.0
    cfg.rollout.num_groups = 16
    cfg.rollout.max_tokens = 168
    cfg.rollout.max_response = 16

    cfg.filter.keep = 1.0
    cfg.loss.clip_high = 0.2
    cfg.loss.entropy_coef = 0.0
    cfg.batch.minibatch_rows = 128
    cfg.batch.microbatch_rows = 64

    cfg.clone.oracle = 0.5
    cfg.clone.steps = 1200
    cfg.eval.every = 30
    return cfg
