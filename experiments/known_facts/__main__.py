"""Does outcome reward alone stop a policy from calling its tool when it can know the answers?

MT-GRPO (arXiv:2505.11821, version 1) reports that GRPO-OR, which is rewarded for the answer alone,
stops searching. In experiments/mtgrpo_search it does not, but there no answer can be known: the
facts are redrawn for each question. Here the facts of none, half or all of the regions are the same
in every question (search.known), and a document still states them. The start is a clone of play
whose guesses name a known answer as often as any other name. It therefore sometimes searches and
sometimes answers from memory, as a pretrained model does.

tiny   Environment, policy, start, rate and limits of experiments/mtgrpo_search.

Endpoints: tool success, the share of episodes with a search (mean of the last three validations),
and exact match. Predicted before the first run: where nothing is known every arm searches in more
than 95 % of its episodes; where everything is, GRPO-OR in less than half, MR and MT, which are paid
for it, in more than 90; where half is, GRPO-OR in 50 to 80. Exact match of the three is within
five points where all is known: the collapse costs tool calls, not answers.
"""

import sys

from experiments import common
from experiments.mtgrpo_search import __main__ as mtgrpo_search

CONFIG = 'configs/demo_search.py'
ROWS = ('turn_credit.mode',)
ARMS = {name: mtgrpo_search.ARMS[name] for name in ('GRPO-OR', 'GRPO-MR', 'MT-GRPO')}
KNOWN = {0: 'none known', 8: 'half known', 16: 'all known'}  # of 16 regions


def tiny():
    shared = mtgrpo_search.WORLD | mtgrpo_search.SIZES | mtgrpo_search.SAME
    arms = {name: shared | arm for name, arm in ARMS.items()}
    columns = {str(number): name for number, name in KNOWN.items()}
    success = {
        'rows': ','.join(ROWS),
        'cols': 'search.known',
        'at': 'last-three',
        'baseline': 'GRPO-MR',
        'margin': 0.05,
        'also': ','.join(mtgrpo_search.FOUR),
        'signals': 'eval/tool_success,policy/entropy',
        'labels': common.labels(CONFIG, arms, ROWS) | columns,
        'clones': 'expert_clones',
    }
    tools = success | {'metric': 'eval/tool_success', 'also': 'eval/answer_presence'}
    cells = common.cross(({'search.known': number} for number in KNOWN), arms.values())
    return common.Plan(CONFIG, cells, {'tools': tools | {'curves': False}, 'success': success})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
