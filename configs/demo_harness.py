"""An agent that calls chat completions, trained from random weights, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_harness.py --workdir=runs/harness

The harness (agentrl_jax/envs/hosts/harness/boxes.py) requests tool calls. A prize is in one of six
boxes; a hint, or the content of a wrong box, names the right one. The policy starts from random
weights without demonstrations. Only calls that open a box are sampled (hosts.forms), so it only has
to learn which box. It has three calls.

Hardware: 2 shared CPU cores, busy with other work.
Time: 170 to 190 s for the 100 steps, including compilation.
Score: 40.6, 50.0, 42.2 % of 128 held-out tasks at step 0, seeds 0 to 2; 87.5, 84.4, 89.1 % after
25 steps, 100 % after 100 in all three; return .84; the best player earns .875 on average.
The other APIs (--config.harness.run=agentrl_jax.envs.hosts.harness.boxes:play_responses or
play_messages) end with the same figures.
"""

from agentrl_jax.envs.hosts.harness.boxes import BOXES
from configs import demo

STEPS = 100
CALL = '<tool_call>\n{{"name": "open", "arguments": {{"box": "{}"}}}}\n</tool_call>'


def get_config():
    cfg = demo.get_config()
    cfg.steps = STEPS
    cfg.env.name = 'harness'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 512
    cfg.env.eval_levels = 128
    cfg.harness.run = 'agentrl_jax.envs.hosts.harness.boxes:play'
    cfg.harness.expert = 'agentrl_jax.envs.hosts.harness.boxes:expert'
    cfg.hosts.forms = tuple(CALL.format(box) for box in BOXES)
    cfg.hosts.read_tokens = 16
    cfg.rollout.constrain = 'own'
    cfg.rollout.num_groups = 16
    cfg.rollout.max_tokens = 80
    cfg.rollout.max_response = 6
    cfg.optim.schedule_steps = 2 * STEPS
    cfg.eval.every = 25
    return cfg
