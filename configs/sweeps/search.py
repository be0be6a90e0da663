"""GRPO-OR, GRPO-MR, MT-GRPO and MT-PPO with a search engine (arXiv:2505.11821, both versions).

python -m agentrl_jax.sweep --config=configs/search.py --sweep=configs/sweeps/search.py \
    --workdir=runs/search --config.model.path=Qwen2.5-7B

The three methods of the first version only differ in credit. MT-PPO is from the second version,
with its sizes: Search-R1's tags, three passages per search, four searches and an answer, a critic,
KL .001, gamma = lambda = 1.

Hardware: never run. Time and score: not known.
"""

MT_PPO = {
    'algorithm': 'ppo',
    'search.dialect': 'search_r1',
    'search.rewards': 'mt_ppo',
    'search.normaliser': 'squad',
    'search.calls': 0,
    'search.turns': 5,
    'search.hops': (1, 2),
    'env.max_turns': 5,
    'hosts.stop': ('</search>', '</answer>'),
    'rollout.num_groups': 512,
    'rollout.group_size': 1,
    'rollout.max_tokens': 6144,
    'rollout.temperature': 1.0,
    'loss.kl_coef': 0.001,
    'optim.beta2': 0.999,
    'optim.max_grad_norm': 1.0,
    'batch.minibatch_rows': 256,
    'batch.epochs': 1,
    'steps': 500,
}


def sweep(add):
    for mode in ('or', 'mr', 'mt_v1'):
        add({'turn_credit.mode': mode})
    add(MT_PPO)
