"""How well does self-play work in a game with hidden cards, and what stops it from cycling?

Leduc Hold'em from random weights (configs/self_play.py). RLOO against an opponent that bets at
random learns to beat that opponent. In self-play with credit per seat (RAE) both players change,
and policy gradients can chase each other round an equilibrium. An entropy bonus draws them to it,
and so may opponents from earlier steps (snapshots: every 25 steps, the last four).

tiny   The policy of configs/demo.py, 100 steps. Every arm has about the same number of policy
       tokens: self-play trains on both seats, so arms with one seat have twice the groups.

Endpoint: eval/exploitability (chips) and eval/success (against random play) at the last three
validations (mean). Predicted before the first run, from runs of configs/self_play.py with seed 100
(bonus of 0.1: 1.48 after 25 steps, with entropy at 0.4; 0.2: 0.72, 0.69, 0.76 after 25, 50, 75) and
no runs of the other arms: RLOO against random play has the highest success and more than 2 chips of
exploitability, about the same as random play itself. Self-play ends below 0.9 with the bonus of 0.3
and above 1.2 with 0.05. Snapshots change it by less than 0.2 at 0.3, and lower it by more than that
at 0.05, where the policy alone forgets how to mix.
"""

import sys

from experiments import common

BASE = 'configs/self_play.py'
LONGER = {'steps': 100, 'optim.schedule_steps': 400}
ONE_SEAT = {'rollout.num_groups': 64, 'batch.minibatch_rows': 128}  # also four optimiser steps
SNAPSHOTS = {'self_play.snapshots': 4, 'self_play.every': 25} | ONE_SEAT
ARMS = {
    'self-play, 0.3': {'loss.entropy_coef': 0.3},
    'self-play, 0.05': {'loss.entropy_coef': 0.05},
    'snapshots, 0.3': {'loss.entropy_coef': 0.3} | SNAPSHOTS,
    'snapshots, 0.05': {'loss.entropy_coef': 0.05} | SNAPSHOTS,
    'against random': {
        'leduc.opponent': 'random',
        'algorithm': 'rloo',
        'loss.kl_coef': 0.0,
        'loss.entropy_coef': 0.05,
    }
    | ONE_SEAT,
}
ROWS = ('algorithm', 'self_play.snapshots', 'loss.entropy_coef')


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'against random',
        'at': 'last-three',
        'labels': common.labels(BASE, ARMS, ROWS),
        'signals': 'rollout/success,policy/entropy',
    }
    tables = {
        'exploitability': table | {'metric': 'eval/exploitability'},
        'success': table | {'curves': False},
    }
    return common.Plan(BASE, tuple(LONGER | arm for arm in ARMS.values()), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
