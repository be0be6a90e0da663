"""Five algorithms from one clone, three seeds each; all else is as in configs/demo_cloned.py.

What their papers do besides (KL, weights of rows) is set aside, so that they differ in credit only.

python -m agentrl_jax.sweep --config=configs/demo_cloned.py \
    --sweep=configs/sweeps/demo_algorithms.py --workdir=runs/demo_algorithms --jobs=2

Hardware: 2 shared CPU cores, one run at a time.
Time: 90 to 230 s a run for its 200 steps, in two of 15 above 500.
Score: 63.7 to 68.6 %, from 25.5 % after cloning; three seeds cannot tell them apart
(experiments/algorithms/README.md).
"""

SAME = {'loss.kl_coef': 0.0, 'loss.aggregation': 'token_mean'}
ALGORITHMS = {
    'ppo': {},
    'grpo': SAME,
    'mt_grpo': SAME | {'turn_credit.outcome': 'success'},
    'rloo': SAME,
    'reinforce_pp': SAME,
}


def sweep(add):
    for algorithm, settings in ALGORITHMS.items():
        for seed in range(3):
            add({'algorithm': algorithm, 'seed': seed} | settings)
