"""RAE in self-play on Leduc Hold'em from nothing, the demo's small policy."""

import ml_collections

from configs import demo

STEPS = 200
# Game -> turns of both players, tokens of an episode
SIZES = {'leduc': (8, 300), 'connect_four': (42, 2400)}


def get_config(game='leduc'):
    if game not in SIZES:
        raise ValueError(f'configs/self_play.py:{game}: no such game; known are {", ".join(SIZES)}')
    cfg = demo.get_config()
    cfg.algorithm = 'rae'
    cfg.steps = STEPS
    cfg.env.name = game
    cfg.env.prompt = (
        'plain'  # prompts of validation, where turns are those of one player, are alike
    )
    cfg.env.max_turns, cfg.rollout.max_tokens = SIZES[game]
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = cfg.env.max_turns
    cfg.env.train_levels = 65536
    cfg.context.window = 1
    cfg.leduc = ml_collections.ConfigDict(dict(short=True, opponent='self', position=True))
    cfg.connect_four = ml_collections.ConfigDict(dict(short=True, opponent='self'))
    cfg.optim.schedule_steps = 4 * STEPS
    cfg.loss.entropy_coef = 0.05
    return cfg
