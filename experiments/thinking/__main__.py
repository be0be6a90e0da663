"""Are thoughts worth their tokens, and does their content matter?

RAGEN (arXiv:2504.20073, Table 4) finds that reasoning before an answer helps in some environments.
experiments/agents could not decide it: its arms started from clones of play that was random in
at least half of the turns, and only the thoughts named the expert's actions. Here all arms have the
same few episodes of an expert, which is followed in all turns (clone.oracle=1), or in half of them
(0.5) while thoughts name its actions. Answers are legal in all arms (rollout.constrain).

act            answers with actions alone
act, cloned on act, with a clone of three times the steps
empty          thought tags in front of each answer, with no text between them in demonstrations
think          a thought that names all remaining actions of the expert, ten at most

tiny   FrozenLake with six by six cells, the goal up to ten moves away, and Sokoban, 256 episodes
       of the expert; policy, PPO and falling rate of experiments/beyond_clone without an entropy
       bonus, which would reward noise in thoughts. All arms train for the same steps. Rate: seed
       100, clean episodes, last three validations at 2.5e-4, 5e-4, 1e-3: act 47.7, 49.9, 38.7 % on
       FrozenLake and 30.4, 34.8, 26.6 on Sokoban, think 34.2, 38.7, 39.0 and 24.5, 23.6, 24.5.

Endpoint: success at the last three validations (mean), and read at equal sampled tokens. Predicted
before the first run of a table. Clean episodes: think is below act by more than five points in both
environments, at equal steps and at equal tokens; empty is within five of act at equal steps; act,
cloned on starts higher than act and ends within five of it. Half of the turns: think is above act
at the start, and on FrozenLake at the end.

Second stage, because with three seeds every interval includes 0, and because think is read before
its rate has fallen: at the tokens where act ends, think has done a third of its steps. From clean
episodes, act and `think, 36 steps`, whose rate falls within these steps and whose tokens were meant
to match, run with ten seeds: FrozenLake first, Sokoban as time allows (folder thinking_again;
--only=clone.oracle=1.0 and an arm's fields). Predicted before the first run of that arm: it is
below act in both environments, and the interval excludes 0.
"""

import sys

from experiments import common
from experiments.agents.__main__ import ACTS, NAMES, NAMES_ALL, budget
from experiments.beyond_clone.__main__ import FEW

CONFIG = 'configs/demo.py'
ROWS = ('env.think', 'clone.thoughts', 'clone.steps', 'steps')
STEPS, THIRD = 100, 36
SHORT, LONG = 150, 450  # steps of cloning
ARMS = {
    'act': {'env.think': False, 'clone.steps': SHORT},
    'act, cloned on': {'env.think': False, 'clone.steps': LONG},
    'empty': {'env.think': True, 'clone.steps': SHORT},
    'think': {'env.think': True, 'clone.steps': SHORT, 'clone.thoughts': True},
    'think, 36 steps': {
        'env.think': True,
        'clone.steps': SHORT,
        'clone.thoughts': True,
        'steps': THIRD,
        'optim.schedule_steps': 4 * THIRD,
        'eval.every': 4,
    },
}
WORLDS = {
    'frozen_lake': {'frozen_lake.size': 6, 'clone.episodes': 256},
    'sokoban': {'clone.episodes': 256, 'loss.value_coef': 0.005},
}
CLEAN, HALF = 1.0, 0.5  # shares of turns that follow the expert
SHARED = FEW | {
    'model.tokenizer': 'agentrl_jax/tokens/agents.model',
    'steps': STEPS,
    'optim.schedule_steps': 4 * STEPS,
    'optim.lr': 5e-4,
    'loss.entropy_coef': 0.0,
    'eval.every': 10,
}


def turns(arm):
    """Add the limits of an arm: three turns of four actions."""
    longest = ACTS + (NAMES_ALL if arm['env.think'] else 0)
    return arm | {'env.max_turns': 3, 'rollout.max_response': longest}


def tiny():
    arms = {name: turns({'steps': STEPS} | arm) for name, arm in ARMS.items()}
    cells = tuple(
        SHARED
        | {'clone.oracle': share, 'env.name': world, 'rollout.max_tokens': budget(arm, world)}
        | more
        | arm
        for share in (CLEAN, HALF)
        for world, more in WORLDS.items()
        for name, arm in arms.items()
        if share == CLEAN or name in ('act', 'think')
    )
    table = {
        'rows': ','.join(ROWS),
        'cols': 'env.name',
        'baseline': 'act',
        'labels': common.labels(CONFIG, arms, ROWS) | NAMES,
        'margin': 0.05,
        'signals': 'policy/entropy,rollout/response_length',
    }
    tables = {}
    for name, share in (('clean', CLEAN), ('half', HALF)):
        where = {'clone.oracle': f'{share:g}', 'steps': f'{STEPS}'}
        tables[name] = table | {'where': where, 'at': 'last-three'}
    where = {'clone.oracle': f'{CLEAN:g}'}
    tables['ten'] = table | {'where': where, 'at': 'last-three', 'seeds': 10}
    return common.Plan(CONFIG, cells, tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
