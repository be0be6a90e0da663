"""What is a teacher on the student's own episodes worth, beside RL and beside cloning?

A policy of half the width of configs/demo.py learns FrozenLake in five ways of about equal cost:
from what a teacher would have said at each of its tokens, over all tokens (`full`) or by those that
were sampled (`sampled`), or would have said with the expert's plan in its prompt (`privileged`);
from the reward alone (`RL`); and as a clone of the expert (`clone`). The teachers, of the demo's
width, are the expert's clones, one for all seeds, and are trained first, as long with the plan in
their prompts as without:

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/distillation/teacher \\
      --config.steps=0 --config.clone.episodes=16384 --config.clone.steps=2500
  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/distillation/hinted \\
      --config.steps=0 --config.clone.episodes=16384 --config.clone.steps=2500 \\
      --config.env.hint=plan --config.rollout.max_tokens=136
  python -m experiments.distillation --scale=tiny --seeds=3

tiny   150 steps of either form, 225 of RL, which has no teacher to read episodes and is given its
       share of the time, 900 of cloning. Costs were estimated, not measured.

Endpoint: success at the last validation. Predicted before the first run: `full` ends within three
points of the teacher and `sampled` within five of `full`, `RL` more than five below `full`, and
`clone` within three of `full`, for the expert is the teacher's own and to be had everywhere. Of
`privileged`, before a run of this experiment: its teacher wins nearly always, for it has but to
copy, and the policy ends within three points of `full`: on maps that it sees whole the plan adds
nothing that the prompt leaves open, and off the plan's way the copyist knows less.
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
