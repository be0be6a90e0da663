"""GRPO-OR, GRPO-MR, MT-GRPO or MT-PPO: which credit teaches a policy to use a search engine?

MT-GRPO (arXiv:2505.11821, version 1) uses TriviaQA questions that one search should answer, and
pays up to .7 for the search and 1.9 for answer and format. Its GRPO-OR receives the outcome alone
and GRPO-MR the sum. MT-GRPO credits the search to the first turn. MT-PPO, of version 2, has a
critic and pays each reward at the end of its turn. All arms here have the rewards of version 1,
start from one clone per seed, and differ in credit only. The other columns are from its tables:
tool success, answer presence (in the first result) and format, as shares of the maximum.

Equal sampled tokens: an arm that searches more samples more tokens per step. Each run is therefore
read on its validation curve at the tokens of the shortest run; the last step has its own table.

tiny   Environment and policy of configs/demo_search.py. No fact can be known from memory and a
       guess is right one time in sixteen, so unlike in the paper GRPO-OR also has to search.
paper  configs/search.py with Qwen2.5-7B's sizes, and MT-PPO with the sizes of version 2.

Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s.
"""

import sys

from configs.sweeps import search as sizes
from experiments import common
from experiments.mtgrpo_credit.__main__ import PUBLISHED
from experiments.turn_credit import __main__ as turn_credit

ROWS = ('algorithm', 'turn_credit.mode')
FOUR = ('eval/tool_success', 'eval/answer_presence', 'eval/exact_match', 'eval/format')


def turns(mode):
    return {'algorithm': 'mt_grpo', 'turn_credit.mode': mode}


NAMES = {'OR': 'GRPO-OR', 'MR': 'GRPO-MR', 'MT': 'MT-GRPO', 'MT-PPO': 'MT-PPO'}
ARMS = {
    'GRPO-OR': turns('or'),
    'GRPO-MR': turns('mr'),
    'MT-GRPO': turns('mt_v1'),
    'MT-PPO': {'algorithm': 'ppo', 'loss.reward_on': 'turn'},
}
SAME = turn_credit.SAME | {'filter.keep': 1.0}
WORLD = {  # one search, then the answer
    'search.rewards': 'mt_grpo',
    'search.calls': 2,
}
SIZES = {
    'steps': 80,
    'eval.every': 5,
    'optim.lr': 1e-4,
    'batch.minibatch_rows': 32,
    'batch.epochs': 1,
}


def table(config, cells):
    return {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'at': 'equal-tokens',
        'baseline': 'GRPO-OR',
        'also': ','.join(FOUR),
        'signals': ','.join((*FOUR, 'policy/entropy')),
        'labels': common.labels(config, cells, ROWS) | {'search': 'success'},
        'clones': 'expert_clones',
        'published': {
            NAMES[name]: {'success': figure} for name, figure in PUBLISHED.items() if name in NAMES
        },
    }


def plan(config, cells):
    tokens = table(config, cells)
    return common.Plan(
        config,
        tuple(cells.values()),
        {'equal_tokens': tokens, 'last': tokens | {'at': 'last', 'curves': False}},
    )


def tiny():
    shared = WORLD | SIZES | SAME
    return plan('configs/demo_search.py', {name: shared | arm for name, arm in ARMS.items()})


def paper():
    return plan('configs/search.py', ARMS | {'MT-PPO': sizes.MT_PPO | ARMS['MT-PPO']})


SCALES = {'tiny': tiny, 'paper': paper}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
