"""GRPO on tool calls of a harness from SmolLM2-135M-Instruct: a pretrained model, two CPU cores.

  hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir SmolLM2-135M-Instruct
  export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
  python -m agentrl_jax.train --config=configs/smollm2_harness.py --workdir=runs/smollm2_harness \\
      --config.model.path=SmolLM2-135M-Instruct

A .gguf works too. The harness is the same as in demo_harness (boxes.py): a prize is in one of six
boxes; a hint, or the content of a wrong box, names the right one. The model's chat template has no
tools, so they are worded as in Qwen2.5's. The common start of all calls is forced, and only tokens
of calls are sampled after it, so the model only has to learn which box. A row has 177 tokens for
tools and task, then about 60 per turn.

Hardware: two CPU cores.
Time: not run yet.
Score: not run yet.
"""

from agentrl_jax.envs.hosts.harness.boxes import BOXES
from configs import base

OPENING = '<tool_call>\n{"name": "open", "arguments": {"box": "'


def get_config():
    cfg = base.get_config()
    cfg.steps = 16
    cfg.algorithm = 'grpo'
    cfg.env.name = 'harness'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 512
    cfg.env.eval_levels = 128
    cfg.harness.run = 'agentrl_jax.envs.hosts.harness.boxes:play'
    cfg.harness.expert = 'agentrl_jax.envs.hosts.harness.boxes:expert'
    cfg.hosts.answer_prefix = OPENING
    cfg.hosts.forms = tuple(f'{OPENING}{box}"}}}}\n</tool_call>' for box in BOXES)
    cfg.hosts.read_tokens = 32

    cfg.model.scan_layers = True  # a small program

    cfg.rollout.constrain = 'own'
    cfg.rollout.num_groups = 8
    cfg.rollout.group_size = 8
    cfg.rollout.max_tokens = 352
    cfg.rollout.max_response = 12
    cfg.rollout.slots = 32

    cfg.filter.keep = 0.5
    cfg.loss.clip_high = 0.2
    cfg.loss.entropy_coef = 0.0
    cfg.optim.lr = 2e-5
    cfg.batch.minibatch_rows = 32
    cfg.batch.microbatch_rows = 4
    cfg.batch.widths = 4
    cfg.eval.every = 8
    cfg.eval.temperature = 1.0  # as in training
    cfg.checkpoint.every = 16
    return cfg
