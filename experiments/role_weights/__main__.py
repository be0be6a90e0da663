"""Do policies learn more if thoughts count less in the loss, and uncertain actions more?

ActFocus (arXiv:2605.14558) weighs the tokens of thoughts by a factor below 1 and the tokens of
actions by their uncertainty. It reports gains of up to 65 points over PPO and GRPO in RAGEN's
environments. Its formulas were not available (agentrl_jax/extras/role_weights): here thoughts have
weight .5, and tokens of actions their entropy divided by its mean. Each is used alone and both
together.

tiny     Forced thoughts: the arm think of experiments/thinking on FrozenLake, cloned on clean
         episodes whose thoughts name the expert's actions. Thoughts and answers are legal by
         grammar. PPO, 100 steps, which add about 12 points; the arm of experiments/thinking_again
         has 36, which add 5.
smollm2  Free text: experiments/smollm2_lake with thoughts. SmolLM2-135M-Instruct is cloned on
         thoughts that name the expert's actions, which three of five turns follow; then GRPO. Use
         --seeds=3.

Endpoint: success, mean of the last three validations; five seeds (tiny). Predicted before the first
run. tiny: each of the three arms is within four points of no weights, and no interval excludes 0;
thoughts x 0.5 is the closest, within two. smollm2: no arm is more than eight points above no
weights; uncertain actions are the best arm, because GRPO has to unlearn random actions; the
entropy ends lower with them. Nothing near 65 points in either.
"""

import sys

from experiments import common
from experiments.agents.__main__ import budget
from experiments.thinking import __main__ as thinking

SMOLLM2 = 'configs/smollm2_frozen_lake.py'
ROWS = ('loss.thought_weight', 'loss.action_uncertainty')
LESS, UNCERTAIN = {'loss.thought_weight': 0.5}, {'loss.action_uncertainty': True}
ARMS = {
    'no weights': {},
    'thoughts x 0.5': LESS,
    'uncertain actions': UNCERTAIN,
    'both': LESS | UNCERTAIN,
}
WORLD = 'frozen_lake'


def plan(config, shared):
    """Return the plan of all arms with these shared overrides."""
    cells = {name: shared | arm for name, arm in ARMS.items()}
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'at': 'last-three',
        'baseline': 'no weights',
        'labels': common.labels(config, cells, ROWS) | {WORLD: 'FrozenLake'},
        'margin': 0.05,
        'signals': 'policy/entropy,rollout/response_length',
    }
    return common.Plan(config, tuple(cells.values()), {'last': table})


def tiny():
    think = thinking.turns(thinking.ARMS['think'])
    shared = thinking.SHARED | thinking.WORLDS[WORLD] | think
    shared |= {'clone.oracle': thinking.CLEAN, 'rollout.max_tokens': budget(think, WORLD)}
    return plan(thinking.CONFIG, shared)


def smollm2():
    longer = {
        'env.think': True,
        'clone.thoughts': True,
        'rollout.max_response': 32,  # six named actions, four actions and the tags
        'rollout.max_tokens': 144,
    }
    return plan(SMOLLM2, longer)


SCALES = {'tiny': tiny, 'smollm2': smollm2}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
