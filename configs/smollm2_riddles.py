"""SmolLM2-135M learns from its own play in a harness, without demonstrations, two CPU cores.

  hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir SmolLM2-135M-Instruct
  python -m agentrl_jax.train --config=configs/smollm2_riddles.py --workdir=runs/riddles \\
      --config.model.path=SmolLM2-135M-Instruct

The task (agentrl_jax/envs/hosts/harness/riddles.py): which of six boxes has the colour of a thing?
The model may name three. Only names are sampled (hosts.forms), so at the first step it already
plays as well as it knows colours; it learns only from its own play. The things of validation and
test are not in training. Random play finds 42.1 % of the prizes (1 - (5/6)^3), and 50 % if it never
repeats a box.

Hardware: one CPU core, the other one busy, 10 GB.
Time: 37 to 48 minutes; 80 to 110 s per step.
Score: seeds 1, 2 and 3 53.9, 57.8 and 60.9 % of 128 validation episodes at step 0, 63.3, 67.2 and
77.3 % at the end (seed 2 fell to 43.0 %); test split 50.0 % untrained, 75.4, 64.1 and 80.1 %;
a clone of the expert 74.2 % of validation (experiments/smollm2_riddles/README.md).
"""

from agentrl_jax.envs.hosts.harness.riddles import COLOURS
from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 24
    cfg.algorithm = 'rloo'
    cfg.env.name = 'harness'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 1024
    cfg.env.eval_levels = 128
    cfg.harness.run = 'agentrl_jax.envs.hosts.harness.riddles:play'
    cfg.harness.expert = 'agentrl_jax.envs.hosts.harness.riddles:expert'
    cfg.hosts.num_items = 4096
    cfg.hosts.forms = COLOURS
    cfg.hosts.read_tokens = 24
    cfg.rollout.constrain = 'own'

    cfg.model.scan_layers = True
    cfg.rollout.num_groups = 8
    cfg.rollout.group_size = 8
    cfg.rollout.max_tokens = 120
    cfg.rollout.max_response = 3

    cfg.filter.keep = 1.0
    cfg.loss.entropy_coef = 0.0
    cfg.optim.lr = 5e-5
    cfg.batch.minibatch_rows = 32
    cfg.batch.microbatch_rows = 8
    cfg.batch.widths = 3  # 40 columns hold everything after the prompt
    cfg.batch.prefix_rows = 8  # a group: most of its tokens are one prompt
    cfg.eval.every = 8
    cfg.eval.temperature = 1.0  # as in training
    cfg.checkpoint.every = 8
    return cfg
