"""SCOUT's setting (arXiv:2601.21754): 25 turns of one action, coordinates in the prompt, Sokoban.

  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct
  python -m agentrl_jax.train --config=configs/scout_setting.py --workdir=runs/scout_setting \\
      --config.model.path=Qwen2.5-0.5B-Instruct

Sizes, rates and the filter are from the authors' code (Harry-mic/SCOUT, commit db0d8ee). It cuts
Sokoban at 10 actions, and only FrozenLake gets 25: --config.env.max_actions_per_episode=10. How
long it clones is not printed; the clone's fields are ours. Other environments of the paper:
  two boxes  --config.sokoban.num_boxes=2
  lakes      --config.env.name=frozen_lake, slippery: --config.frozen_lake.success_rate=0.8

Hardware: never run with a checkpoint.
Time: not known.
Score: not known. Random play, which the paper does not print, stands beside its figures in
agentrl_jax/imitation/README.md.
"""

from configs import sokoban


def get_config():
    cfg = sokoban.get_config()
    cfg.sokoban.observation_format = 'grid_coord'
    cfg.frozen_lake.observation_format = 'grid_coord'
    cfg.frozen_lake.frozen = 0.9
    cfg.frozen_lake.success_rate = 1.0
    cfg.env.max_turns = 25
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 25
    cfg.env.train_levels = 32768
    cfg.env.eval_levels = 256
    cfg.rollout.max_tokens = 16384
    cfg.eval.temperature = 0.5
    cfg.loss.entropy_coef = 0.001

    cfg.clone.expert = 'scout'
    cfg.clone.oracle = 1.0
    cfg.clone.episodes = 4096
    cfg.clone.lr = 1e-5
    return cfg
