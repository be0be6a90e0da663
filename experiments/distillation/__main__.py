"""Does a teacher on the student's own episodes beat RL and behaviour cloning at equal cost?

A policy of half the width of configs/demo.py learns FrozenLake in five ways of about equal cost.
Three of them follow a teacher's distribution at each token of the student: over the full vocabulary
(`full`), at the sampled tokens only (`sampled`), or with the expert's plan in the teacher's prompt
(`privileged`). `RL` learns from the reward alone, and `clone` imitates the expert. The teachers
have the demo's width and are clones of the expert, one for all seeds. They are trained first, for
the same number of steps with and without the plan in their prompts:

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/distillation/teacher \\
      --config.steps=0 --config.clone.episodes=16384 --config.clone.steps=2500
  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/distillation/hinted \\
      --config.steps=0 --config.clone.episodes=16384 --config.clone.steps=2500 \\
      --config.env.hint=plan --config.rollout.max_tokens=136
  python -m experiments.distillation --scale=tiny --seeds=3

tiny   150 steps of each distillation arm, 900 of cloning, and 225 of RL, which has no teacher to
       run and gets that time back as steps. Costs were estimated, not measured.

Endpoint: success at the last validation. Predicted before the first run: `full` ends within three
points of the teacher, `sampled` within five of `full`, `RL` more than five below `full`, and
`clone` within three of `full`, because the teacher's expert is available everywhere. Predicted for
`privileged` before its first run: its teacher nearly always wins, because it only copies the plan,
and the policy ends within three points of `full`. On complete maps the plan adds no information,
and away from the plan a teacher that copies knows less.
"""

import sys

from experiments import common

CONFIG, DISTIL = 'configs/demo.py', 'configs/demo_distil.py'
TEACHER, HINTED = 'runs/distillation/teacher', 'runs/distillation/hinted'
RL_STEPS, CLONE_STEPS = 225, 900
ROWS = ('algorithm', 'opd.divergence', 'opd.privileged', 'steps')
OPD = common.difference(CONFIG, DISTIL) | {'opd.teachers': (TEACHER,)}
WIDTH = {name: value for name, value in OPD.items() if name.startswith('model.')}
ARMS = {
    'full': OPD,
    'sampled': OPD | {'opd.divergence': 'sampled'},
    'privileged': OPD | {'opd.teachers': (HINTED,), 'opd.privileged': 'plan'},
    'RL': WIDTH | {'steps': RL_STEPS, 'optim.schedule_steps': 4 * RL_STEPS},
    'clone': WIDTH
    | {
        'clone.episodes': 16384,
        'clone.oracle': 1.0,
        'clone.lr': 4e-3,
        'clone.steps': CLONE_STEPS,
        'steps': 0,
    },
}


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'RL',
        'labels': common.labels(CONFIG, ARMS, ROWS),
        'margin': 0.03,
        'signals': 'rollout/success,policy/kl_teacher,policy/entropy',
    }
    return common.Plan(CONFIG, tuple(ARMS.values()), {'last': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
