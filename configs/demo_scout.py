"""The agent of `make demo`: scout, clone, RL. FrozenLake without a solver, in three stages.

  python -m agentrl_jax.train --config=configs/demo_scout.py --workdir=runs/demo

The scout learns the game from arrays (agentrl_jax/imitation/README.md), the policy of demo.py
clones its episodes from random weights, and PPO trains the clone.

Hardware: 2 CPU cores; the scores are from one of two shared ones (3.4 minutes a seed).
Time: 168 s including compilation: 37 for the scout, 53 for the clone, 78 for RL.
Score: of 512 validation maps the scout solves 98.8 to 99.4 %, its clone 84.0, 81.2, 82.8, 84.4 and
84.6 %, the clone after RL 88.9, 85.7, 85.9, 88.3 and 88.3 %, seeds 0 to 4 (experiments/demo);
random play 23.3 %, oracle 100 %. With an earlier scout, 2,000 more steps of cloning in place of RL
ended at 90.1 % and cost 1.2 to 1.7 times as much in all (experiments/scout).
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
