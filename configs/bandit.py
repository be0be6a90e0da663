"""StarPO-S on the two-armed bandit: RAGEN's paper (arXiv:2504.20073, branch v0423).

  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct
  python -m agentrl_jax.train --config=configs/bandit.py --workdir=runs/qwen_bandit \\
      --config.model.path=Qwen2.5-0.5B-Instruct

One question, one answer, one arm. Phoenix always pays .1, Dragon pays 1 in one of four pulls;
pulling Dragon counts as success. RAGEN tests on another pair of names: --config.eval.split=test.
Sizes and losses are the same as in frozen_lake.py. --config.bandit.pairs=main uses the twelve pairs
of RAGEN's main branch.

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints 100 % (Fig 9); random play reaches 50 %.
"""

from configs import frozen_lake


def get_config():
    cfg = frozen_lake.get_config()
    cfg.env.name = 'bandit'
    cfg.env.max_turns = 1
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 1
    cfg.bandit.pairs = 'v0423'

    cfg.rollout.max_tokens = 1024
    cfg.rollout.max_response = 500
    return cfg
