"""A policy that clones a scout on RAGEN's SimpleSokoban, one action a turn, without a solver.

  python -m agentrl_jax.train --config=configs/scout_sokoban.py --workdir=runs/scout_sokoban

The rooms are those of demo_sokoban.py, but 32,768 instead of 4,096 of them train. Each prompt shows
only the current room: the scout's action depends on nothing else. There is no RL: steps=0.

Hardware: one of two shared CPU cores.
Time: 650 to 900 CPU-seconds, 80 of them for the scout; up to twice as long by the clock.
Score: 95.1 and 94.3 % of 512 validation rooms, seeds 0 and 1, temperature 1; the scouts 96.9 and
96.3 %, random play 13.5 %, oracle 98.8 %. With four actions a turn, planned blind, 95.1 % (seed 0):
  --config.env.max_turns=3 --config.env.max_actions_per_turn=4 --config.rollout.max_response=9
Scouts of 5 M actions solve 98.0 and 98.2 %, their clones 97.7 and 95.1 %, one action a turn:
  python -m agentrl_jax.scout --config=configs/scout_sokoban.py --workdir=... --steps=5000000
"""

from configs import demo_sokoban


def get_config():
    cfg = demo_sokoban.get_config()
    cfg.steps = 0
    cfg.env.train_levels = 32768
    cfg.env.think = False
    cfg.env.max_turns = 10
    cfg.env.max_actions_per_turn = 1
    cfg.context.window = 1
    cfg.rollout.constrain = 'own'
    cfg.rollout.max_response = 3  # an action, the closing tag and the end
    cfg.rollout.max_tokens = 640

    cfg.clone.expert = 'scout'
    cfg.clone.oracle = 1.0
    cfg.clone.episodes = 32768
    cfg.clone.batch = 256  # turns
    cfg.clone.steps = 4000

    # For --config.steps above 0
    cfg.filter.keep = 1.0
    cfg.batch.epochs = 1
    cfg.batch.minibatch_rows = 64
    cfg.optim.lr = 2.5e-4
    return cfg
