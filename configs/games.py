"""Games, most of them gymnax's and pgx's, with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/games.py --workdir=runs/catch
  python -m agentrl_jax.train --config=configs/games.py:connect_four --workdir=runs/connect_four

Behind the colon: catch, minesweeper, connect_four, game_2048 or leduc; the last three need pip
install pgx. They are told in few tokens (short), and the policy starts from cloning episodes in
which seven turns of ten were played at random.

Hardware: one of two shared CPU cores.
Time: Catch 10 minutes, half of them cloning and compiling.
Score: Catch, seed 0: 31.1 % of 512 held-out seeds after cloning, 95.5 % after 50 steps, 95.3 % of
512 test ones; random play 20 %. The others were not run as they stand. With three times the rate,
an entropy bonus and fewer tokens Connect Four went from 12.5 to 68.4 %, Leduc rose and fell, 2048
ended below random play, and Minesweeper learnt nothing, as it does with these settings
(experiments/LOG.md).
"""

import ml_collections

from configs import demo

# Game -> turns, actions of a turn, tokens of an episode
SIZES = {
    'catch': (4, 1, 224),
    'connect_four': (7, 1, 516),
    'game_2048': (6, 2, 277),
    'leduc': (6, 1, 256),
    'minesweeper': (8, 1, 368),
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
    cfg.optim.lr = 3e-4
    cfg.loss.entropy_coef = 0.0
    cfg.env.train_levels = 4096
    cfg.env.eval_levels = 512
    cfg.clone.episodes = 4096
    cfg.clone.steps = 300

    if game == 'minesweeper':  # it takes more to read the board, and what experts do there
        cfg.clone.oracle, cfg.clone.steps = 0.8, 800

    cfg.catch = ml_collections.ConfigDict(dict(rows=5, columns=5, short=True))
    cfg.game_2048 = ml_collections.ConfigDict(dict(goal=16, short=True))
    cfg.connect_four = ml_collections.ConfigDict(dict(short=True))
    cfg.minesweeper = ml_collections.ConfigDict(dict(mines=2, short=True))
    cfg.leduc = ml_collections.ConfigDict(dict(short=True))
    return cfg
