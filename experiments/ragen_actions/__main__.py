"""Do more actions per turn help an agent, or only the larger action budget that they bring?

RAGEN's Table 3 (arXiv:2504.20073) allows 1 to 7 actions a turn in five turns, so the budget of an
episode grows from 5 to 35 actions. Random play with these budgets reaches the published figures to
within about one standard error of their 256 episodes. Here the budget either grows as in the paper
or stays at 10 actions, from 10 turns of 1 action to 2 turns of 7. Two actions in five turns belong
to both. Every row includes random play with the row's budget.

tiny   FrozenLake with the policy of configs/demo_cloned.py, which is known to learn there; 8 x 16
       episodes. All arms of a seed start from one clone, because separate clones start lower with
       more actions a turn. It is trained on up to 7 actions a turn, with prompts that do not
       contain the budget.
0.5b   Sokoban and FrozenLake, budget growing and fixed. paper: the published setting, training on
       Sokoban, growing budget, for Qwen2.5-0.5B-Instruct.

The paper's FrozenLake column is, by its launch script, the validation of a policy trained on
Sokoban. Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s.
"""

import sys

from experiments import common

COUNTS = range(1, 8)
BUDGET, TURNS = 10, 5
NAMES = {'sokoban': 'Sokoban', 'frozen_lake': 'FrozenLake'}
ROWS = {str(count): f'{count} action{"s" * (count > 1)}' for count in COUNTS}
PRINTED = {  # Table 3, per cent
    'Sokoban': (12.11, 16.41, 19.53, 26.95, 28.13, 33.59, 22.27),
    'FrozenLake': (11.72, 18.36, 20.88, 20.70, 21.09, 18.36, 19.53),
}


def episode(count, turns, budget):
    return {
        'env.max_actions_per_turn': count,
        'env.max_turns': turns,
        'env.max_actions_per_episode': budget,
    }


GROWING = [episode(count, TURNS, TURNS * count) for count in COUNTS]
FIXED = [episode(count, -(-BUDGET // count), BUDGET) for count in COUNTS]  # turns rounded up


def plan(config, episodes, more, worlds):
    """Return a plan of all episodes in all environments, with a table for each budget."""
    table = {
        'rows': 'env.max_actions_per_turn',
        'cols': 'env.name',
        'labels': NAMES | ROWS,
        'signals': 'group/return_std,policy/entropy',
    }
    published = {
        ROWS[str(count)]: {name: f'{row[count - 1]}' for name, row in PRINTED.items()}
        for count in COUNTS
    }
    growing = {'where': {'env.max_turns': str(TURNS)}, 'published': published}
    fixed = {'where': {'env.max_actions_per_episode': str(BUDGET)}}
    tables = {'growing_budget': table | growing}
    if any(cell in episodes for cell in FIXED if cell not in GROWING):
        tables['fixed_budget'] = table | fixed
    cells = common.cross(episodes, [more], [{'env.name': world} for world in worlds])
    return common.Plan(config, cells, tables)


def every_episode():
    return GROWING + [cell for cell in FIXED if cell not in GROWING]


def tiny():
    """Plan tiny: n actions take 2 n + 5 tokens of the demo's tokenizer, a prompt at most 19."""
    answer = 2 * COUNTS[-1] + 5  # more actions in an answer are cut, as always
    more = {
        'steps': 60,
        'eval.every': 20,
        'rollout.num_groups': 8,
        'rollout.group_size': 16,
        'rollout.max_response': answer,
        'env.prompt': 'plain',
        'clone.oracle': 0.8,
        'clone.steps': 1000,
        'clone.max_turns': 2,
        'clone.max_actions_per_turn': COUNTS[-1],
        'clone.max_actions_per_episode': 14,
        'clone.max_tokens': 8 + 2 * (21 + answer),
    }
    base = plan('configs/demo_cloned.py', every_episode(), more, ['frozen_lake'])
    tokens = [
        {'rollout.max_tokens': 8 + cell['env.max_turns'] * (21 + answer)} for cell in base.cells
    ]
    return base._replace(cells=tuple(c | t for c, t in zip(base.cells, tokens, strict=True)))


def half_billion():
    more = {'steps': 200, 'eval.every': 10, 'rollout.max_tokens': 4800}
    return plan('configs/sokoban.py', every_episode(), more, list(NAMES))


def paper():
    more = {'steps': 200, 'eval.every': 10, 'rollout.max_tokens': 3600, 'batch.microbatch_rows': 4}
    return plan('configs/sokoban.py', GROWING, more, ['sokoban'])


SCALES = {'tiny': tiny, '0.5b': half_billion, 'paper': paper}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
