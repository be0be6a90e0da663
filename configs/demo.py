"""PPO on FrozenLake from random weights, without demonstrations: a small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/demo

The policy starts from random weights without demonstrations. Sampling is restricted to legal
answers (rollout.constrain), so it only has to learn where to go. The learning rate decays: at a
constant 1e-3, even a policy that starts at 82 % ends at 74.5 % (experiments/clean_start).

Hardware: 2 shared CPU cores.
Time: 272 s for the 450 steps, including compilation.
Score: 80.7, 82.4, 80.7, 75.4, 76.6 % of 512 validation maps, seeds 0 to 4
(experiments/from_nothing); 16 % at step 0, random play 23.3 %, oracle 100 %, the expert's clone at
the same cost 92 %.
"""

from configs import small

STEPS = 450


def get_config():
    cfg = small.get_config()
    cfg.steps = STEPS
    cfg.clone.episodes = 0
    cfg.env.think = False
    cfg.rollout.constrain = 'own'
    cfg.rollout.max_response = 9  # four moves, three separators, the tag and the end

    # One pass in small batches: a second pass costs the same and improves little
    cfg.batch.epochs = 1
    cfg.batch.minibatch_rows = 64
    cfg.batch.microbatch_rows = 64
    cfg.batch.widths = 3
    cfg.optim.lr = 1e-3
    cfg.optim.schedule = 'cosine'
    cfg.optim.schedule_steps = 4 * STEPS  # four minibatches per step
    cfg.optim.final_lr = 0.05
    cfg.loss.entropy_coef = 0.01  # nats per choice; forced tokens have none
    return cfg
