"""Games, most of them gymnax's and pgx's, with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/games.py --workdir=runs/catch
  python -m agentrl_jax.train --config=configs/games.py:connect_four --workdir=runs/connect_four

Behind the colon: catch, minesweeper, connect_four, game_2048 or leduc; the last three need pip
install pgx. They are told in few tokens (short), and the policy starts from cloning episodes in
which seven turns of ten were played at random.

Hardware: 2 CPU cores are enough.
Time: not recorded.
Score: none; no run of it is in experiments/.
"""

import ml_collections

from configs import demo

# Game -> turns, actions of a turn, tokens of an episode
SIZES = {
    'catch': (4, 1, 192),
    'connect_four': (7, 1, 256),
    'game_2048': (6, 2, 240),
    'leduc': (6, 1, 256),
    'minesweeper': (6, 1, 224),
}


def get_config(game='catch'):
    if game not in SIZES:
        raise ValueError(f'configs/games.py:{game}: no such game; known are {", ".join(SIZES)}')
    cfg = demo.get_config()
    cfg.steps = 100
    cfg.env.name = game
    cfg.env.max_turns, cfg.env.max_actions_per_turn, cfg.rollout.max_tokens = SIZES[game]
    cfg.env.max_actions_per_episode = cfg.env.max_turns * cfg.env.max_actions_per_turn
    cfg.rollout.max_response = 9
    cfg.env.train_levels = 4096
    cfg.env.eval_levels = 512
    cfg.clone.episodes = 4096
    cfg.clone.steps = 300

    cfg.catch = ml_collections.ConfigDict(dict(rows=5, columns=5, short=True))
    cfg.game_2048 = ml_collections.ConfigDict(dict(goal=16, short=True))
    cfg.connect_four = ml_collections.ConfigDict(dict(short=True))
    cfg.minesweeper = ml_collections.ConfigDict(dict(mines=3, short=True))
    cfg.leduc = ml_collections.ConfigDict(dict(short=True))
    return cfg
