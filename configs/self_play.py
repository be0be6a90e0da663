"""RAE in self-play on Leduc Hold'em from nothing, the demo's small policy, one CPU core.

  python -m agentrl_jax.train --config=configs/self_play.py --workdir=runs/self_play
  python -m agentrl_jax.extras.self_play.elo --workdir=runs/self_play

After the colon of the config: leduc (default) or connect_four. Random weights and no
demonstration, under the grammar of answers; the policy has both seats. eval/success is against a
player who moves at random, eval/exploitability (Leduc) is what a perfect opponent would win, in
chips a game: random play loses 2.374. Needs pip install pgx.

Hardware: one of two shared CPU cores.
Time: Leduc about five minutes of a core alone: 2.2 s of it a step, the rest compiling; beside other
work 10 s a step.
Score: Leduc, seed 100, with which the entropy bonus was chosen: exploitability 2.40 at step 0, then
0.81, 1.17 and 0.65 after 20, 40 and 60: it goes down, and still in circles. Against random play
48, 54, 48 and 48 % of games and +0.15, +1.29, +0.93 and +1.12 chips a game. With a bonus of 0.1
exploitability was at 1.48 after 25 steps. Connect Four was not run.
"""

import ml_collections

from configs import demo

STEPS = 60
# Game -> turns of both players, tokens of an episode
SIZES = {'leduc': (8, 300), 'connect_four': (42, 2880)}


def get_config(game='leduc'):
    if game not in SIZES:
        raise ValueError(f'configs/self_play.py:{game}: no such game; known are {", ".join(SIZES)}')
    cfg = demo.get_config()
    cfg.algorithm = 'rae'
    cfg.steps = STEPS
    cfg.eval.every = 20
    cfg.env.name = game
    cfg.env.prompt = 'plain'  # so that those of validation, whose turns are one player's, are alike
    cfg.env.max_turns, cfg.rollout.max_tokens = SIZES[game]
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = cfg.env.max_turns
    cfg.env.train_levels = 65536
    cfg.context.window = 1
    cfg.leduc = ml_collections.ConfigDict(dict(short=True, opponent='self', position=True))
    cfg.connect_four = ml_collections.ConfigDict(dict(short=True, opponent='self'))
    if game == 'connect_four':  # episodes are five times as long
        cfg.rollout.num_groups, cfg.batch.minibatch_rows, cfg.batch.microbatch_rows = 8, 16, 16
    cfg.optim.schedule_steps = 4 * STEPS
    cfg.loss.entropy_coef = 0.3  # of chips: draws it to an equilibrium (nats of a choice)
    cfg.batch.widths = 1  # prompts of single turns are alike in length
    return cfg
