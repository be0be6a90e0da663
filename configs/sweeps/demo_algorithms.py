"""Five algorithms from one clone, three seeds each; otherwise as in configs/demo_cloned.py.

Other parts of their papers (KL, weights of rows) are disabled, so they only differ in credit.

python -m agentrl_jax.sweep --config=configs/demo_cloned.py \
    --sweep=configs/sweeps/demo_algorithms.py --workdir=runs/demo_algorithms --jobs=2

Hardware: 2 shared CPU cores, one run at a time.
Time: 90 to 230 s per run of 200 steps; two of 15 took above 500 s.
Score: 63.7 to 68.6 %, from 25.5 % after cloning; indistinguishable with three seeds
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
