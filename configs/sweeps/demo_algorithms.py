"""Five algorithms on the demo, three seeds each; all else is as in configs/demo.py.

python -m agentrl_jax.sweep --config=configs/demo.py --sweep=configs/sweeps/demo_algorithms.py \
    --workdir=runs/demo_algorithms --jobs=2
"""

ALGORITHMS = ('ppo', 'grpo', 'mt_grpo', 'rloo', 'reinforce_pp')


def sweep(add):
    for algorithm in ALGORITHMS:
        for seed in range(3):
            add(algorithm=algorithm, seed=seed)
