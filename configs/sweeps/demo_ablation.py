"""Ablation of StarPO-S (arXiv:2504.20073) from a clone: all combinations of its components.

configs/demo_cloned.py has three components that StarPO lacks: the filter, clip-higher, and no KL to
the start policy. The sweep has all eight combinations, three seeds each. Without the filter, all
256 episodes of a step are trained instead of 64. Minibatches are then four times larger, so that
the number of optimiser steps stays the same.

python -m agentrl_jax.sweep --config=configs/demo_cloned.py \
    --sweep=configs/sweeps/demo_ablation.py --workdir=runs/demo_ablation --jobs=2

Hardware, time and score: not run with exactly these settings. For the same question with five seeds
in another setting, see experiments/ragen_starpo_vs_s/README.md.
"""

NO_FILTER = {'filter.keep': 1.0, 'batch.minibatch_rows': 128}
NO_CLIP_HIGHER = {'loss.clip_high': 0.2}
KL = {'loss.kl_coef': 0.001, 'loss.kl_in': 'loss'}


def get_hyper(h):
    pieces = [[{}, without] for without in (NO_FILTER, NO_CLIP_HIGHER, KL)]
    return h.product([*pieces, h.sweep('seed', range(3))])
