"""Does a growing horizon beat a fixed long one where turns can be wasted?

On FrozenLake it does not (experiments/scaling_inter), but an episode there ends by itself, after
3.7 of 8 turns. ScalingInter-RL (arXiv:2509.08755) is about agents that keep talking: a fixed long
horizon collapses, a short one levels off. In the card catalogue a policy may look up a card in each
of its turns, and one to three lookups are needed. Either the outcome alone is rewarded, or each new
card as well, so that continuing pays. The amounts are those of MT-GRPO's first version, where all
calls of an episode together earn at most the reward of one.

tiny   Twelve turns, four, or four, eight, then twelve, 20 steps each, from the start of
       experiments/beyond_clone (16 clean demonstrations, about 17 % of held-out levels), under
       the grammar; GRPO with the paper's KL, at two rates. All are validated with twelve turns.

Endpoint: success at the last three validations (mean), and read at equal sampled tokens. Predicted
before the first run, outcome alone: no arm collapses (ends below three quarters of its best), short
is within five points of growing, because four turns are enough, and at equal tokens growing is
ahead of long by less than five. Lookups paid: long and growing end with more than eight turns an
episode, and short, which cannot wander while it trains, is above both.

Second stage, because seeds disagree where lookups pay: that half at 2.5e-4 with ten seeds.
  python -m experiments.horizon --scale=tiny --seeds=10 \\
      --only=library.tool_reward=0.2,optim.lr=0.00025
Predicted before seeds 3 to 9: long collapses in at least four of ten, growing in fewer, short
never. Growing is above long and below short, and the interval of growing minus long excludes 0.
"""

import sys

from experiments import common
from experiments.beyond_clone.__main__ import FEWER
from experiments.scaling_inter.__main__ import GRPO

CONFIG = 'configs/demo_library.py'
ROWS = ('curriculum.rounds', 'library.tool_reward', 'optim.lr')
RATES = (1e-3, 2.5e-4)
REWARDS = {
    'outcome': {'library.tool_reward': 0.0, 'library.presence_reward': 0.0},
    'lookups': {'library.tool_reward': 0.2},
}
HORIZONS = {'short': (4,), 'long': (12,), 'growing': (4, 8, 12)}
CELLS = {
    f'{name}, {paid}, {rate:g}': {'curriculum.rounds': rounds, 'optim.lr': rate} | rewards
    for rate in RATES
    for paid, rewards in REWARDS.items()
    for name, rounds in HORIZONS.items()
}
FEW = FEWER | {'clone.steps': 150, 'env.think': False, 'rollout.constrain': 'own'}
STEPS = 60


def tiny():
    """Plan the tiny scale; a turn of the catalogue takes at most 33 tokens."""
    everywhere = (
        GRPO
        | FEW
        | {
            'steps': STEPS,
            'eval.every': 10,
            'curriculum.stage_steps': STEPS // 3,
            'env.max_turns': 12,
            'env.max_actions_per_episode': 12,
            'rollout.max_tokens': 416,
            'rollout.num_groups': 16,
            'rollout.group_size': 8,
            'batch.minibatch_rows': 32,
            'batch.microbatch_rows': 32,
            'batch.epochs': 1,
            'batch.widths': 4,
        }
    )
    table = {
        'rows': ','.join(ROWS),
        'labels': common.labels(CONFIG, CELLS, ROWS),
        'at': 'last-three',
        'also': 'eval/return',
        'margin': 0.05,
        'signals': 'rollout/turns,group/return_std,policy/entropy',
    }
    tables = {}
    for paid, rewards in REWARDS.items():
        where = {'library.tool_reward': f'{rewards["library.tool_reward"]:g}'}
        half = table | {'where': where, 'baseline': f'long, {paid}, 0.00025'}
        tables[paid] = half
        tables[f'{paid}_tokens'] = half | {'at': 'equal-tokens', 'curves': False}
    doubtful = tables['lookups']['where'] | {'optim.lr': '0.00025'}
    tables['ten'] = tables['lookups'] | {'where': doubtful, 'seeds': 10}
    tables['ten_tokens'] = tables['ten'] | {'at': 'equal-tokens', 'curves': False}
    return common.Plan(CONFIG, common.cross(CELLS.values(), [everywhere]), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
