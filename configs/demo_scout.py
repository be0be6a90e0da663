"""Scout, clone, RL: FrozenLake from nothing in three stages, each with its held-out success.

  python -m agentrl_jax.scout --config=configs/demo_scout.py --workdir=runs/scout --steps=500000
  python -m agentrl_jax.train --config=configs/demo_scout.py --workdir=runs/scout

The scout learns the game from arrays (agentrl_jax/imitation/README.md), the policy of demo.py
clones its episodes, and PPO trains the clone. No solver is used.

Hardware: one of two shared CPU cores.
Time: 190 to 230 CPU-seconds for the three stages, including compilation.
Score: of 512 validation maps the scout solves 98.8, 98.6 and 98.2 %, its clone 76.6, 79.9 and
81.8 %, the clone after RL 83.8, 84.0 and 83.0 %, seeds 0, 1 and 2; random play 23.3 %, oracle
100 %, the expert's clone at about this cost 92 %.
"""

from configs import small

STEPS = 150


def get_config():
    cfg = small.get_config()
    cfg.steps = STEPS
    cfg.env.think = False
    cfg.rollout.constrain = 'own'
    cfg.rollout.max_response = 9  # four moves, three separators, the tag and the end
    cfg.clone.expert = 'scout'
    cfg.clone.episodes = 8192
    cfg.clone.steps = 800

    cfg.batch.epochs = 1
    cfg.batch.minibatch_rows = 64
    cfg.batch.widths = 3
    cfg.optim.schedule = 'cosine'
    cfg.optim.schedule_steps = 4 * STEPS  # four minibatches per step
    cfg.optim.final_lr = 0.05
    cfg.loss.clip_high = 0.28
    return cfg
