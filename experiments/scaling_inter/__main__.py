"""Does a horizon that grows during training beat a fixed short and a fixed long one?

AgentGym-RL (arXiv:2509.08755, "ScalingInter-RL") reports for its search task, where training allows
5, 10, or 5, 8, then 10 turns: fixed long collapses, fixed short levels off, growing ends highest.
One seed, one environment. Here all three play the same number of episodes and are validated at the
full horizon from the start; curves over tokens show how much the shorter episodes save.

tiny   FrozenLake with one move a turn: 2, 8, or 2, 4, then 8 turns, 50 steps a stage, 150 steps;
       GRPO with all groups and the paper's KL; the policy of configs/demo_cloned.py and its clone.
       With two moves a turn and 2, 3, 5 turns the horizon did not matter.
0.5b   The same horizons at RAGEN's sizes. paper: rounds, stage and optimiser of the released search
       script for Qwen2.5-7B-Instruct, on the card catalogue with up to seven lookups: the search
       environment itself is not part of this package. Its other environments: SCHEDULES.

Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s. The published figures are
training rewards read off a figure at 370 steps.
"""

import sys

from experiments import common

ROWS = ('curriculum.rounds',)
SCHEDULES = {  # released rounds and steps per stage
    'WebArena': ((8, 12, 15), 80),
    'DeepSearch': ((5, 8, 10), 100),
    'TextCraft': ((10, 20, 30), 100),
    'SciWorld': ((10, 20, 30), 100),
    'BabyAI': ((6, 13, 20), 100),
}
NAMES = {'frozen_lake': 'FrozenLake', 'library': 'card catalogue'}
PUBLISHED = {
    'fixed short': '≈ 54.5 (DeepSearch)',
    'fixed long': '< 30 (DeepSearch)',
    'growing': '≈ 63 (DeepSearch)',
}
GRPO = {
    'algorithm': 'grpo',
    'filter.keep': 1.0,
    'loss.clip_high': 0.2,
    'loss.kl_coef': 0.001,
    'loss.kl_in': 'loss',
    'loss.kl_estimator': 'k3',
    'loss.aggregation': 'token_mean',
    'loss.reward_on': 'turn',  # needs a critic: no effect here
}


def plan(config, rounds, stage_steps, world, more):
    """Return a plan with the horizon fixed at the first round, at the last one, and growing."""
    horizons = {'fixed short': rounds[:1], 'fixed long': rounds[-1:], 'growing': rounds}
    cells = {name: {'curriculum.rounds': turns} for name, turns in horizons.items()}
    everywhere = GRPO | {
        'curriculum.stage_steps': stage_steps,
        'env.max_turns': rounds[-1],
        'env.name': world,
    }
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'baseline': 'fixed long',
        'labels': common.labels(config, cells, ROWS) | NAMES,
        'signals': 'group/return_std,policy/entropy,policy/grad_norm',
        'clones': 'expert_clones',
        'published': {name: {NAMES[world]: text} for name, text in PUBLISHED.items()},
    }
    best = {'at': 'best-validation', 'published': {}, 'curves': False}
    equal = {'at': 'equal-tokens', 'published': {}, 'curves': False, 'margin': 0.05}
    tables = {'last': table, 'best': table | best, 'equal_tokens': table | equal}
    return common.Plan(config, common.cross(cells.values(), [everywhere | more]), tables)


def tiny():
    """Plan the tiny scale: an answer takes 7 tokens of the demo's tokenizer, a turn 28."""
    more = {
        'steps': 150,
        'eval.every': 25,
        'env.max_actions_per_turn': 1,
        'rollout.max_response': 7,
        'rollout.max_tokens': 8 + 8 * 28,
        'rollout.num_groups': 8,
        'rollout.group_size': 16,
        'batch.minibatch_rows': 64,
        'optim.lr': 3e-4,
        'loss.entropy_coef': 0.005,
    }
    return plan('configs/scaling_inter.py', (2, 4, 8), 50, 'frozen_lake', more)


def half_billion():
    more = {'steps': 200, 'env.max_actions_per_turn': 2, 'loss.entropy_coef': 0.001}
    return plan('configs/frozen_lake.py', (2, 3, 5), 67, 'frozen_lake', more)


def paper():
    rounds, stage_steps = SCHEDULES['DeepSearch']
    more = {
        'steps': 370,
        'loss.entropy_coef': 0.001,
        'env.prompt': 'tools',
        'env.max_actions_per_turn': 1,
        'env.max_actions_per_episode': rounds[-1],
        'library.max_hops': 7,
        'model.dtype': 'bfloat16',
        'model.remat': True,
        'rollout.num_groups': 32,
        'rollout.group_size': 4,
        'rollout.max_response': 512,
        'rollout.max_tokens': 1024 + 8192,
        'batch.minibatch_rows': 32,
        'batch.microbatch_rows': 1,
        'eval.temperature': 1.0,
    }
    return plan('configs/base.py', rounds, stage_steps, 'library', more)


SCALES = {'tiny': tiny, '0.5b': half_billion, 'paper': paper}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
