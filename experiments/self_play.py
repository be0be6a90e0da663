"""What is self-play worth in a game that hides cards, and what keeps it from going in circles?

Leduc Hold'em from random weights (configs/self_play.py). RLOO against a player who bets at random
learns to beat that one. In self-play with credit per seat (RAE) nobody stands still, and policy
gradients may chase each other round an equilibrium: an entropy bonus draws them to it, and so may
opponents from before (snapshots: every 25 steps, the last four).

tiny   the policy of configs/demo.py, 200 steps; about as many tokens of the policy in each arm: of
       two seats that it plays itself it trains on both, so arms with one seat have twice the
       groups.

Endpoint: eval/exploitability (chips) and eval/success (against random play) at the last three
validations (mean). Predicted before the first run, from a run of configs/self_play.py with the
bonus of 0.2 and seed 100 that was at 0.72 after 25 steps, and from nothing of the other arms: RLOO
against random play has the highest success and more than 2 chips of exploitability, about as much
as random play itself; self-play is below 0.9 with the bonus of 0.2, and 0.2 or more above that with
0.02; snapshots change it by less than 0.2 at the bonus of 0.2, and lower it at 0.02.
"""

import sys

from experiments import common

BASE = 'configs/self_play.py'
ONE_SEAT = {'rollout.num_groups': 64, 'batch.minibatch_rows': 128}  # four optimiser steps, as all
SNAPSHOTS = {'self_play.snapshots': 4, 'self_play.every': 25} | ONE_SEAT
ARMS = {
    'self-play, 0.2': {'loss.entropy_coef': 0.2},
    'self-play, 0.02': {'loss.entropy_coef': 0.02},
    'snapshots, 0.2': {'loss.entropy_coef': 0.2} | SNAPSHOTS,
    'snapshots, 0.02': {'loss.entropy_coef': 0.02} | SNAPSHOTS,
    'against random': {
        'leduc.opponent': 'random',
        'algorithm': 'rloo',
        'loss.kl_coef': 0.0,
        'loss.entropy_coef': 0.02,
    }
    | ONE_SEAT,
}
ROWS = ('algorithm', 'self_play.snapshots', 'loss.entropy_coef')


def tiny():
    table = {
        'rows': ','.join(ROWS),
        'baseline': 'against random',
        'also': 'eval/exploitability',
        'labels': common.labels(BASE, ARMS, ROWS),
        'signals': 'rollout/success,policy/entropy',
    }
    return common.Plan(BASE, tuple(ARMS.values()), {'self_play': table})


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
