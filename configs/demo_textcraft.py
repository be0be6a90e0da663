"""Turn-GRPO on TextCraft over HTTP with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_textcraft.py --workdir=runs/textcraft

The run starts its own server with AgentGym's protocol. Goals are one or two crafts deep, and the
planner needs two or three commands: 130 training goals, 12 held out, each in 32 variants. To suit a
small model, the system message is one sentence, there is one superfluous recipe, 'Action: ' is
forced at the start of each answer, and items have one of twelve names, drawn again for each variant
(textcraft.wording). So no goal can be memorised (experiments/LOG.md has the results with
Minecraft's names). Cloned episodes have five turns: half are the planner's, half are random. After
cloning, the policy uses commands from the prompt, but rarely in the right order.

Hardware: 2 shared CPU cores.
Time: 7 min 22 s (seed 2, little else running; the same bits next to a test suite in 18 minutes).
Score: 25.0 [20.1, 30.6], 45.3 [39.3, 51.4] and 23.4 % [18.7, 29.0] after cloning, seeds 0, 1 and 2;
55.1 [49.0, 61.1], 66.8 [60.8, 72.3] and 58.2 % [52.1, 64.1] 100 steps later, of 256 variants of the
held-out goals (95 % Wilson intervals). On the same variants: random play 28.4 %, planner 100 %.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.steps = 100
    cfg.env.name = 'textcraft'
    cfg.env.max_turns = 5
    cfg.env.train_levels = 4160  # all
    cfg.env.eval_levels = 256
    cfg.hosts.launch = 1
    cfg.hosts.room = 256
    cfg.hosts.prompt = 'short'
    cfg.textcraft.wording = 'drawn'
    cfg.textcraft.distractors = 1
    cfg.textcraft.depths = (1, 2)
    cfg.textcraft.most_commands = 3
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
    cfg.clone.steps = 800
    cfg.eval.every = 25
    return cfg
