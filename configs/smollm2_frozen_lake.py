"""GRPO on FrozenLake from SmolLM2-135M-Instruct: a pretrained model that learns to read a map.

  hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir SmolLM2-135M-Instruct
  export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
  python -m agentrl_jax.train --config=configs/smollm2_frozen_lake.py --workdir=runs/smollm2_lake \\
      --config.model.path=SmolLM2-135M-Instruct

Two of five cloned paths are random, which leaves GRPO something to unlearn.

Hardware: one CPU core of 71 GFLOP/s in float32, 10 GB.
Time: 80 minutes, 38 of them cloning.
Score: seeds 2 and 3 48.4 and 49.2 % of 128 validation lakes after cloning, 76.6 and 76.6 % at the
end, the same on the test split (experiments/smollm2_lake/README.md). Random play 31.5 %, the oracle
100 %.
"""

from configs import base, smollm2_library


def get_config():
    cfg = smollm2_library.get_config()
    cfg.steps = 24
    cfg.algorithm = 'grpo'
    cfg.turn_credit = base.get_config().turn_credit
    cfg.env.name = 'frozen_lake'
    cfg.env.max_turns = 2
    cfg.env.max_actions_per_turn = 4
    cfg.env.max_actions_per_episode = 8
    cfg.env.format_penalty = -0.1
    cfg.frozen_lake.observation_format = 'cells'
    cfg.frozen_lake.size = 3
    cfg.frozen_lake.frozen = 0.8
    cfg.frozen_lake.success_rate = 1.0

    cfg.rollout.max_tokens = 104
    cfg.rollout.max_response = 12
    cfg.rollout.slots = 64
    cfg.rollout.serve_rows = 8
    cfg.batch.microbatch_rows = 8
    cfg.batch.widths = 2

    cfg.clone.episodes = 4096
    cfg.clone.max_turns = 1
    cfg.clone.steps = 400
    cfg.clone.batch = 8
    cfg.clone.microbatch_rows = 8
    return cfg
