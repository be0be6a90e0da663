"""On-policy distillation: the clone of an expert teaches a policy of half its width.

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/teacher \\
      --config.steps=0 --config.clone.episodes=4096
  python -m agentrl_jax.train --config=configs/demo_distil.py --workdir=runs/distil \\
      --config.opd.teachers="('runs/teacher',)"

The teacher is the demo's policy, cloned from 4,096 clean episodes. The student begins with random
weights, plays, and learns by reverse KL over all legal tokens what the teacher would have said at
each of them; no reward is used (opd.reward_coef adds it). A run, its folder best, a HuggingFace
folder or a .gguf can teach, several as one (agentrl_jax/algorithms/README.md).

Hardware: one CPU core.
Time: not run.
Score: not run.
"""

from configs import demo

STEPS = 150


def get_config():
    cfg = demo.get_config()
    cfg.algorithm = 'opd'
    cfg.opd.teachers = ('runs/teacher',)
    cfg.steps = STEPS
    cfg.model.hidden_size = 32
    cfg.model.intermediate_size = 64

    cfg.optim.lr = 2e-3
    cfg.optim.schedule_steps = 4 * STEPS  # four minibatches a step
    cfg.loss.entropy_coef = 0.0  # the teacher says how sure to be
    return cfg
