"""On-policy distillation: an expert's clone teaches a policy of half its width.

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/teacher \\
      --config.steps=0 --config.clone.episodes=4096
  python -m agentrl_jax.train --config=configs/demo_distil.py --workdir=runs/distil \\
      --config.opd.teachers="('runs/teacher',)"

The teacher is the demo's policy, cloned from 4,096 clean episodes. The student starts from random
weights, plays, and minimises the reverse KL to the teacher over all legal tokens. It uses no reward
(opd.reward_coef adds it). A teacher is a run, its folder best, a HuggingFace folder or a .gguf;
several teachers are possible (agentrl_jax/algorithms/README.md).

Hardware: one CPU core, shared with about ten other programs.
Time: 4 min 26 s of CPU for the student and 2 min 27 s for the teacher, including compilation; 39
and 15 minutes of wall-clock time.
Score: 63.5 % [59.2, 67.5] of 512 validation maps, seed 0, after 15.2 % at step 0; its teacher
85.5 %, random play 23.3 %, oracle 100 %. The KL to the teacher fell from 2.27 to .67 nats per
token, and both were still improving.
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
    cfg.optim.schedule_steps = 4 * STEPS  # four minibatches per step
    cfg.loss.entropy_coef = 0.0  # the teacher determines the entropy
    return cfg
