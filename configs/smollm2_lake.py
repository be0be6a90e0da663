"""GRPO on FrozenLake from SmolLM2-135M-Instruct, each cell a token: two CPU cores.

  hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir SmolLM2-135M-Instruct
  python -m agentrl_jax.train --config=configs/smollm2_lake.py --workdir=runs/smollm2_lake \\
      --config.model.path=SmolLM2-135M-Instruct
  python -m agentrl_jax.evaluate --workdir=runs/smollm2_lake --config.eval.split=test

Lakes of three by three, where nine cells of ten are firm. A text model knows nothing of maps:
cloning teaches it to read one, which takes many more turns than to copy a name does.

Hardware: 2 CPU cores, 8 GB.
Time: not recorded.
Score: none; no run of it is in experiments/.
"""

from configs import base, smollm2_library


def get_config():
    cfg = smollm2_library.get_config()
    cfg.algorithm = 'grpo'
    cfg.turn_credit = base.get_config().turn_credit  # GRPO credits whole episodes
    cfg.env.name = 'frozen_lake'
    cfg.env.max_turns = 2
    cfg.env.max_actions_per_turn = 3
    cfg.env.max_actions_per_episode = 6
    cfg.env.format_penalty = -0.1
    cfg.frozen_lake.observation_format = 'cells'
    cfg.frozen_lake.size = 3
    cfg.frozen_lake.frozen = 0.8
    cfg.frozen_lake.success_rate = 1.0

    cfg.rollout.max_tokens = 104
    cfg.rollout.max_response = 10

    cfg.clone.episodes = 1600
    cfg.clone.steps = 100
    return cfg
