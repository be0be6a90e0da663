"""Do several rewards train better if each is compared on its own before they are added?

GDPO (arXiv:2601.05242) divides each reward by its own std in a group, then adds; GRPO divides the
sum. The paper reports that GRPO maps different combinations of rewards to the same advantage and
lets a reward with a large spread hide the others. It trains single answers of models from 1.5B on.

tiny   The card catalogue with the policy, the start and the rate of experiments/mtgrpo_credit. Four
       rewards: format (-.2 for an invalid answer), lookup of a new card (.2), the card with the
       answer (.5), and the right answer (1.5). "Turns" credits the first three to their turns. In
       the second table the right answer pays .15, a tenth, as if its scale had been chosen badly.

Endpoint: exact match, mean of the last three validations; five seeds. Predicted before the first
run: with the given scales GDPO is within three points of one sum, and with turns up to five points
below it (as MT-GRPO is). With a tenth of the outcome one sum loses ten points or more to the better
scale, GDPO less than three, so that GDPO is ten points or more above one sum.
"""

import sys

from experiments import common
from experiments.mtgrpo_credit import __main__ as mtgrpo_credit

CONFIG = 'configs/demo_cloned.py'
ROWS = ('algorithm', 'gdpo.turns')
NAMES = ('format', 'lookup', 'presence', 'outcome')
ARMS = {
    'one sum': {'algorithm': 'grpo'},
    'GDPO': {'algorithm': 'gdpo'},
    'GDPO, turns': {'algorithm': 'gdpo', 'gdpo.turns': NAMES[:3]},
}
FUNCTIONS = {'given': 'parts', 'tenth': 'small_outcome'}


def tiny():
    shared = mtgrpo_credit.library(CONFIG, 'configs/demo_library.py')
    shared |= mtgrpo_credit.SMALL | {
        'env.format_penalty': 0.0,
        'reward.components': NAMES,
        'loss.aggregation': 'token_mean',
        'loss.kl_coef': 0.0,
    }
    cells, tables = [], {}
    for name, function in FUNCTIONS.items():
        rewards = {'reward.function': f'experiments.several_rewards.rewards:{function}'}
        arms = {label: shared | rewards | arm for label, arm in ARMS.items()}
        cells += arms.values()
        tables[name] = {
            'rows': ','.join(ROWS),
            'cols': 'env.name',
            'at': 'last-three',
            'baseline': 'one sum',
            'where': rewards,
            'also': 'eval/tool_success,eval/answer_presence,eval/tool_calls,eval/valid_format',
            'signals': 'eval/tool_success,eval/answer_presence,policy/entropy',
            'labels': common.labels(CONFIG, arms, ROWS) | mtgrpo_credit.EXACT,
            'clones': 'expert_clones',
        }
    return common.Plan(CONFIG, tuple(cells), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
