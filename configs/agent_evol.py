"""AgentEvol (arXiv:2406.04151) with the demo's small policy: explore, imitate what paid, go again.

  python -m agentrl_jax.train --config=configs/agent_evol.py --workdir=runs/agent_evol

FrozenLake. The base policy is cloned from the oracle's play, as the paper clones expert
trajectories; four iterations of 50 steps explore with the policy of their beginning and learn from
the base policy again. Every episode that reached the goal is imitated, by its return, and a fifth
of each step's rows are demonstrations of the oracle. No filter, clip range, KL or entropy bonus.
Where agentrl_jax differs from the paper is listed in agentrl_jax/algorithms/agent_evol.py.

Hardware: 2 CPU cores are enough.
Time: not recorded.
Score: none; no run of it is in experiments/.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.algorithm = 'agent_evol'
    cfg.critic.share_backbone = False
    cfg.env.format_penalty = 0.0  # the reward is 1 for the goal and 0 else
    cfg.evol.iteration = 50  # of 200 steps: four
    cfg.evol.base_rows = 64
    cfg.batch.minibatch_rows = 160

    # Few of them and few steps: a policy that has seen enough of the oracle has nothing to explore
    cfg.clone.episodes = 1024
    cfg.clone.steps = 300
    cfg.clone.oracle = 1.0
    return cfg
