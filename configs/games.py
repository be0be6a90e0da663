"""Games of pgx and gymnax with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/games.py --workdir=runs/catch

Catch of gymnax. --config.env.name=connect_four, game_2048 or leduc plays a game of pgx, which needs
pip install pgx. These games have no expert, so nothing is cloned first.

Hardware: 2 CPU cores are enough.
Time: not recorded.
Score: none; no run of it is in experiments/.
"""

import ml_collections

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.env.name = 'catch'
    cfg.env.max_turns = 5
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 5
    cfg.clone.episodes = 0
    cfg.rollout.max_tokens = 400

    cfg.catch = ml_collections.ConfigDict(dict(rows=6, columns=5))
    cfg.game_2048 = ml_collections.ConfigDict(dict(goal=32))
    cfg.connect_four = ml_collections.ConfigDict()
    cfg.leduc = ml_collections.ConfigDict()
    return cfg
