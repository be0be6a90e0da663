"""StarPO-S on Sokoban from a real checkpoint: RAGEN's paper (arXiv:2504.20073, branch v0423).

  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct
  python -m agentrl_jax.train --config=configs/sokoban.py --workdir=runs/qwen_sokoban \\
      --config.model.path=Qwen2.5-0.5B-Instruct

Rooms of 6x6 with one box (RAGEN's SimpleSokoban). Sizes and losses are from frozen_lake.py. RAGEN's
other rooms:
  larger   --config.sokoban.dim=8 --config.sokoban.num_boxes=2 --config.sokoban.search_depth=10
  symbols  --config.sokoban.search_depth=30 --config.sokoban.symbols=W.GCBA@

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints 18.8 % (Fig 9), about what random play reaches here (17.4 %).
"""

from configs import frozen_lake


def get_config():
    cfg = frozen_lake.get_config()
    cfg.env.name = 'sokoban'
    cfg.sokoban.dim = 6
    cfg.sokoban.num_boxes = 1
    cfg.sokoban.search_depth = 300
    return cfg
