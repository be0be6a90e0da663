"""Do turn rewards teach an agent to use its tool, or does their placement?

MT-GRPO (arXiv:2505.11821) compares the outcome alone (OR), outcome plus turn rewards in one sum
(MR) and turn rewards credited to their own turns (MT, MT-PPO). Its second version's MR lacks
rewards that MT-PPO has, so content and placement change together. The flattened arms separate them:
all content, one advantage per episode. An independent replication found +6.6 points for content and
-2.7 for placement, one seed.

tiny   The card catalogue with configs/demo_library.py's policy: one to three lookups, then the
       answer; a guess is right one time in sixteen. At the demo's learning rate MT-GRPO finishes in
       15 steps, so the rate is 3e-4 here, with half the episodes. Cloning is longer: policies that
       cannot read cards yet learn it at a step that depends on the seed and hides everything else.
       Outcomes exact or graded (word F1).
0.5b   configs/library.py with 8 x 16 episodes, two to four lookups. paper: published optimiser,
       batch and rewards, on the catalogue instead of a search engine; v1 (one lookup, then the
       answer; Qwen2.5-7B) and v2 (four turns, PPO; minibatch 256 and entropy 0 are not stated
       there). v2's bonuses of .1 a turn and .2 an episode for good format are penalties here.

Tuning: --first_seed=100 --workdir=runs/tuning, as in ragen_starpo_vs_s. MT is the form for K turns,
mt_cumulative; at paper scale v1's own, mt_v1. MT compares a turn among the members that took it,
which gives no signal on whether to continue. Turn GRPO is the same credit without that bias. The
columns after exact match: shares of lookups that find a card and of episodes that read the answer's
card, lookups, and valid format.
"""

import sys

from experiments import common

ROWS = ('algorithm', 'turn_credit.mode', 'loss.reward_on')
OWN = ('algorithm', 'turn_credit.outcome')  # fields that the arms set, not the config
EXACT = {'library': 'exact match'}


def turns(mode):
    return {'algorithm': 'mt_grpo', 'turn_credit.outcome': 'answer', 'turn_credit.mode': mode}


def ppo(reward_on):
    return {'algorithm': 'ppo', 'loss.reward_on': reward_on}


ARMS = {
    'OR': turns('or'),
    'MR': turns('mr'),
    'MT': turns('mt_cumulative'),
    'flattened MT': turns('flattened'),
    'turn GRPO': {'algorithm': 'turn_grpo'},
    'MT-PPO': ppo('turn'),
    'flattened MT-PPO': ppo('episode'),
}
HOPS = {'library.min_hops': 2, 'library.max_hops': 4}
PUBLISHED = {  # exact match, per cent
    'OR': '0.0 (v1, TriviaQA)',
    'MR': '33.5 (v1, TriviaQA)',
    'MT': '50.1 (v1, TriviaQA)',
    'MT-PPO': '44.7 (v2, mean of six sets), 27.4 (replication, HotpotQA)',
    'flattened MT-PPO': '30.1 (replication, HotpotQA)',
    'PPO-OR': '43.2 (v2, mean of six sets), 0.2 (replication, HotpotQA)',
    'PPO-MR': '42.9 (v2, mean of six sets), 23.5 (replication, HotpotQA)',
}

SMALL = {  # sizes of the tiny scale
    'steps': 40,
    'optim.lr': 3e-4,
    'rollout.num_groups': 16,
    'batch.minibatch_rows': 64,
    'clone.episodes': 16384,
    'clone.steps': 1600,
}


def table(config, cells, rows, baseline, where):
    return {
        'rows': ','.join(rows),
        'cols': 'env.name',
        'baseline': baseline,
        'where': where,
        'also': 'eval/tool_success,eval/answer_presence,eval/tool_calls,eval/valid_format',
        'signals': 'eval/tool_success,eval/answer_presence,eval/tool_calls,policy/entropy',
        'labels': common.labels(config, cells, rows) | EXACT,
        'clones': 'expert_clones',
        'published': {
            name: {'exact match': PUBLISHED[name]} for name in cells if name in PUBLISHED
        },
    }


def library(base, other):
    """Return the fields that `other` changes in `base`, except for the arms' fields."""
    fields = common.difference(base, other)
    return {name: value for name, value in fields.items() if name not in OWN}


def both_outcomes(config, more):
    """Return a plan with all arms for binary and for graded outcomes, with a table for each."""
    outcomes = {'binary': False, 'graded': True}
    cells = common.cross(
        ARMS.values(), [{'library.graded': graded} for graded in outcomes.values()], [more]
    )
    tables = {
        name: table(config, ARMS, ROWS, 'MR', {'library.graded': str(graded)})
        for name, graded in outcomes.items()
    }
    tables['graded']['also'] += ',eval/answer_f1'
    return common.Plan(config, cells, tables)


def tiny():
    more = library('configs/demo_cloned.py', 'configs/demo_library.py') | SMALL
    return both_outcomes('configs/demo_cloned.py', more)


def half_billion():
    more = library('configs/base.py', 'configs/library.py') | HOPS
    more |= {
        'rollout.num_groups': 8,
        'rollout.group_size': 16,
        'batch.minibatch_rows': 128,
    }
    return both_outcomes('configs/base.py', more)


def paper():
    """Plan v1 (2400 prompts in 150 rollouts of 16 x 21) and v2 (500 steps of 512 episodes)."""
    config = 'configs/base.py'
    rows = (*ROWS, 'env.format_penalty', 'library.lookup_cost')
    shared = library(config, 'configs/library.py') | {'rollout.stop_at_answer': True}
    one = shared | {
        'library.min_hops': 1,
        'library.max_hops': 1,
        'env.max_turns': 2,
        'env.max_actions_per_episode': 2,
    }
    first = {'OR': turns('or'), 'MR': turns('mr'), 'MT': turns('mt_v1')}
    two = shared | {
        'steps': 500,
        'env.max_turns': 4,
        'env.max_actions_per_episode': 4,
        'library.max_hops': 3,
        'library.tool_reward': 0.0,
        'library.presence_reward': 0.3,
        'library.answer_reward': 1.0,
        'rollout.num_groups': 512,
        'rollout.group_size': 1,
        'rollout.temperature': 1.0,
        'loss.kl_coef': 0.001,
        'loss.kl_in': 'reward',
        'optim.critic_lr': 1e-5,
        'optim.beta2': 0.999,
        'optim.max_grad_norm': 1.0,
        'optim.warmup_steps': 0,
        'batch.minibatch_rows': 256,
        'batch.epochs': 1,
        'library.lookup_cost': 0.1,
    }
    no_cost = {'library.lookup_cost': 0.0}
    outcome_only = no_cost | {'library.presence_reward': 0.0, 'env.format_penalty': 0.0}
    second = {
        'PPO-OR': two | ppo('episode') | outcome_only,
        'PPO-MR': two | ppo('episode') | no_cost,
        'MT-PPO': two | ppo('turn'),
        'flattened MT-PPO': two | ppo('episode'),
    }
    cells = {name: one | arm for name, arm in first.items()} | second
    return common.Plan(
        config, tuple(cells.values()), {'exact_match': table(config, cells, rows, '', {})}
    )


SCALES = {'tiny': tiny, '0.5b': half_billion, 'paper': paper}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
