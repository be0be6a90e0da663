"""Do the remedies against a fall of entropy keep PPO from collapsing on Sokoban?

verl, SkyRL and TRL offer clip-cov and kl-cov (arXiv:2505.22617), training of the most uncertain
fifth of the tokens (arXiv:2506.01939) and an entropy bonus below a target (arXiv:2505.22312); see
agentrl_jax/extras/entropy_control. In experiments/echo_trap PPO falls from a peak of 42 % to 30 %
at a rate of 1e-3 and climbs to 54 % at 2.5e-4. The entropy of a token falls from .45 to about .25
nats at both rates (three seeds). At 1e-3 it rises to 3.7 nats later in one seed.

tiny   PPO of experiments/echo_trap, 2 x 4 updates, at both rates, and each remedy with it. clip-cov
       and kl-cov select a twentieth of the tokens, about one of the 21 that an episode samples.
       kl-cov also runs without the clip, as published. The bonus of the target is .02 below .3
       nats; all other arms have the constant .005 of echo_trap.

Endpoint: success, mean of the last three validations; ten seeds. A run has collapsed if that is at
most three quarters of its best validation. Predicted before the first run: at 2.5e-4 clip-cov,
kl-cov and the target are within five points of PPO, the uncertain fifth is two to eight below and
kl-cov without the clip more than five below. At 1e-3 no arm reaches 45 %, which one update in place
of four reaches in echo_trap, because entropy falls equally where PPO does not fail. There clip-cov
and the target are within five points of PPO, kl-cov is up to eight above it, because it penalises
large changes, the uncertain fifth is below it, and kl-cov without the clip is more than ten below.
"""

import sys

from experiments import common
from experiments.echo_trap import __main__ as echo_trap

CONFIG = 'configs/demo_sokoban.py'
ROWS = ('algorithm', 'entropy.method', 'loss.clip_low')
NO_CLIP = {'loss.clip_low': 1.0, 'loss.clip_high': 1e6}


def control(method, **settings):
    """Return the overrides of a method."""
    named = {f'entropy.{name}': value for name, value in settings.items()}
    return {'algorithm': 'entropy_control', 'entropy.method': method} | named


ARMS = {
    'PPO': {},
    'clip-cov': control('clip_cov', share=0.05),
    'kl-cov': control('kl_cov', share=0.05),
    'kl-cov, no clip': control('kl_cov', share=0.05) | NO_CLIP,
    'uncertain fifth': control('top', share=0.2),
    'target': control('target', target=0.3) | {'loss.entropy_coef': 0.02},
}
RATES = {'0.001': echo_trap.FAST, '0.00025': echo_trap.SLOW}


def tiny():
    shared = echo_trap.MORE | echo_trap.PPO
    arms = {name: shared | arm for name, arm in ARMS.items()}
    cells = [arm | rate for rate in RATES.values() for arm in arms.values()]
    table = {
        'rows': ','.join(ROWS),
        'cols': 'optim.lr',
        'baseline': 'PPO',
        'clones': 'expert_clones',
        'labels': common.labels(CONFIG, arms, ROWS),
        'at': 'last-three',
        'margin': 0.05,
        'also': 'eval/valid_format',
    }
    tables = {
        'last': table | {'signals': 'policy/entropy,group/return_std,policy/grad_norm'},
        'best': table | {'at': 'best-validation', 'curves': False},
    }
    return common.Plan(CONFIG, tuple(cells), tables)


SCALES = {'tiny': tiny}

if __name__ == '__main__':
    sys.exit(common.main(__file__, __doc__, SCALES))
