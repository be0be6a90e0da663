"""RAE in self-play on Leduc Hold'em from random weights, the demo's small policy, one CPU core.

  python -m agentrl_jax.train --config=configs/self_play.py --workdir=runs/self_play
  python -m agentrl_jax.extras.self_play.elo --workdir=runs/self_play

After the colon of the config: leduc (default) or connect_four. The policy starts from random
weights without demonstrations, with a grammar of answers, and plays both seats. eval/success is
against a random player. eval/exploitability (Leduc) is a perfect opponent's win in chips per game:
random play loses 2.374. Needs pip install pgx.

Hardware: one of two shared CPU cores.
Time: Leduc about five minutes on one idle core: 2.2 s per step, the rest compiling; 10 s per step
next to other work.
Score: Leduc, seed 100, which was also used to choose the entropy bonus: exploitability 2.40 at step
0, then 0.81, 1.17 and 0.65 after 20, 40 and 60: it falls, but still oscillates. Against random play
48, 54, 48 and 48 % of games and +0.15, +1.29, +0.93 and +1.12 chips per game. With a bonus of 0.1
exploitability was 1.48 after 25 steps. Connect Four was not run.
"""

import ml_collections

from configs import demo

STEPS = 60
# Game -> turns of both players, tokens per episode
SIZES = {'leduc': (8, 300), 'connect_four': (42, 2880)}


def get_config(game='leduc'):
    if game not in SIZES:
        raise ValueError(f'configs/self_play.py:{game}: no such game; choose {", ".join(SIZES)}')
    cfg = demo.get_config()
    cfg.algorithm = 'rae'
    cfg.steps = STEPS
    cfg.eval.every = 20
    cfg.env.name = game
    cfg.env.prompt = 'plain'  # the same as in validation, which has one player's turns
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
    cfg.loss.entropy_coef = 0.3  # in chips per nat of a choice: pulls it to an equilibrium
    cfg.batch.widths = 1  # prompts of single turns have similar lengths
    return cfg
