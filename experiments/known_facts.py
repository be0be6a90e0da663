"""Does the outcome alone stop a policy from calling its tool where it can know the answers?

MT-GRPO (arXiv:2505.11821, version 1) reports that GRPO-OR, which is rewarded for the answer alone,
stops searching. In experiments/mtgrpo_search.py it does not, but nothing can be known there: what
belongs where is drawn anew for each question. Here that of no region, of half of them or of all is
the same in every question (search.known), a document says it all the same, and the start was cloned
on play whose guesses name a known answer as often as any name that was shown. So the start is one
that sometimes searches, sometimes answers by heart, as a pretrained model's is.

tiny   World, policy, start, rate and budget of experiments/mtgrpo_search.py.

Endpoints: tool success, the share of episodes with a search (mean of the last three validations),
and exact match. Predicted before the first run: where nothing is known every arm searches in more
than 95 % of its episodes; where everything is, GRPO-OR in less than half, MR and MT, which are paid
for it, in more than 90; where half is, GRPO-OR in 50 to 80. Exact match of the three is within five
points wherever all is known: the collapse costs tool calls, not answers.
"""

import sys

from experiments import common, mtgrpo_search

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
        'clones': 'expert_clones_tiny',
    }
    tools = success | {'metric': 'eval/tool_success', 'also': 'eval/answer_presence'}
    cells = common.cross(({'search.known': number} for number in KNOWN), arms.values())
    return common.Plan(CONFIG, cells, {'tools': tools | {'curves': False}, 'success': success})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
