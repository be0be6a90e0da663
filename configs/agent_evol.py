"""AgentEvol (arXiv:2406.04151) with the demo's small policy: explore, imitate successes, repeat.

  python -m agentrl_jax.train --config=configs/agent_evol.py --workdir=runs/agent_evol

The environment is FrozenLake. The base policy is cloned from the oracle, as the paper clones expert
trajectories. Each of four iterations of 50 steps explores with the policy from its start, and
trains the base policy again. Episodes that reach the goal are imitated, weighted by their return; a
fifth of each step's rows are oracle demonstrations. There is no filter, clip range, KL or entropy
bonus. agentrl_jax/algorithms/agent_evol.py lists differences from the paper.

Hardware: 2 CPU cores are enough.
Time: not recorded.
Score: none; experiments/ has no run of it.
"""

from configs import small


def get_config():
    cfg = small.get_config()
    cfg.algorithm = 'agent_evol'
    cfg.critic.share_backbone = False
    cfg.env.format_penalty = 0.0  # the reward is 1 at the goal, otherwise 0
    cfg.evol.iteration = 50  # of 200 steps: four
    cfg.evol.base_rows = 64
    cfg.batch.minibatch_rows = 160

    # Few demonstrations and steps: a well-cloned policy has nothing left to explore
    cfg.clone.episodes = 1024
    cfg.clone.steps = 300
    cfg.clone.oracle = 1.0
    return cfg
