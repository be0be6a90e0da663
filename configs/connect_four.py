"""PPO on Connect Four from nothing, the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/connect_four.py --workdir=runs/connect_four

The policy starts from random weights without demonstrations. A grammar constrains its answers, and
the opponent moves at random. A game has seven discs per player. Needs pip install pgx.

Hardware: one of two shared CPU cores.
Time: 14 minutes for the 110 steps, busy with other work.
Score: 68.9 % of 512 held-out seeds, seed 0 (experiments/beyond_clone), 8.8 % at step 0; random
play 9.3 %, the expert 88.1 %, its clone at equal cost 68.8 %.
"""

import ml_collections

from configs import demo

STEPS = 110


def get_config():
    cfg = demo.get_config()
    cfg.steps = STEPS
    cfg.env.name = 'connect_four'
    cfg.connect_four = ml_collections.ConfigDict(dict(short=True))
    cfg.env.max_turns = 7
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 7
    cfg.env.train_levels = 65536
    cfg.rollout.max_tokens = 516
    cfg.optim.schedule_steps = 4 * STEPS
    return cfg
