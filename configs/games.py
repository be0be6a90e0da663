"""Games, mostly from gymnax and pgx, with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/games.py --workdir=runs/catch
  python -m agentrl_jax.train --config=configs/games.py:connect_four --workdir=runs/connect_four

After the colon: catch, minesweeper, connect_four, game_2048 or leduc; the last three need pip
install pgx. Observations use few tokens (short=True). Seven of ten cloned turns are random; in
2048 and Minesweeper only two of ten, so that the policy learns to read the board.

Hardware: one of two shared CPU cores.
Time: 9 (Leduc) to 28 minutes (Minesweeper), half of them cloning and compiling.
Score: success on 512 held-out seeds, in per cent, seed 0:
  catch         31.1 after cloning, 95.5 after 50 steps; random play 20, expert 100
  minesweeper   55.5, 86.5 after 100 steps; 12, 94
  connect_four  14.1, 68.8; 9, 88
  game_2048     15.0, 47.1; 25, 98
  leduc         56.2, 71.5 (76.0 after 75); 47, 78
and on 512 test seeds 95.3, 85.9, 71.1, 51.6 and 72.3 %. experiments/LOG.md has earlier settings.
For catch and minesweeper only seeds are held out: all of catch's five games and minesweeper's 120
boards with two mines (560 with three) are also in training.
"""

import ml_collections

from configs import demo_cloned

# Game -> turns, actions per turn, tokens per answer, tokens per episode
SIZES = {
    'catch': (4, 1, 9, 224),
    'connect_four': (7, 1, 9, 516),
    'game_2048': (6, 2, 12, 300),
    'leduc': (6, 1, 9, 256),
    'minesweeper': (8, 1, 9, 368),
}


def get_config(game='catch'):
    if game not in SIZES:
        raise ValueError(f'configs/games.py:{game}: no such game; choose {", ".join(SIZES)}')
    cfg = demo_cloned.get_config()
    cfg.steps = 100
    cfg.env.name = game
    turns, actions, cfg.rollout.max_response, cfg.rollout.max_tokens = SIZES[game]
    cfg.env.max_turns, cfg.env.max_actions_per_turn = turns, actions
    cfg.env.max_actions_per_episode = turns * actions
    cfg.optim.lr = 3e-4
    cfg.loss.entropy_coef = 0.0
    cfg.env.train_levels = 4096
    cfg.env.eval_levels = 512
    cfg.clone.episodes = 4096
    cfg.clone.steps = 300
    if game in ('game_2048', 'minesweeper'):  # random turns do not teach reading the board
        cfg.clone.oracle, cfg.clone.steps = 0.8, 800
    if game == 'leduc':  # a tenth would be negligible next to 13 chips
        cfg.env.format_penalty = -1.0

    cfg.catch = ml_collections.ConfigDict(dict(rows=5, columns=5, short=True))
    cfg.game_2048 = ml_collections.ConfigDict(dict(goal=16, short=True))
    cfg.connect_four = ml_collections.ConfigDict(dict(short=True))
    cfg.minesweeper = ml_collections.ConfigDict(dict(mines=2, short=True))
    cfg.leduc = ml_collections.ConfigDict(dict(short=True))
    return cfg
