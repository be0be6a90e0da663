"""The default agent of `make demo`: StarPO-S on FrozenLake, a small policy, two CPU cores.

make demo        or: python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/demo
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 60
    cfg.env.prompt = 'brief'
    cfg.env.max_turns = 3
    cfg.frozen_lake.success_rate = 0.8

    cfg.model.hidden_size = 64
    cfg.model.intermediate_size = 128
    cfg.model.num_layers = 3
    cfg.model.num_heads = 4
    cfg.model.num_kv_heads = 2

    cfg.rollout.num_groups = 16
    cfg.rollout.group_size = 8
    cfg.rollout.max_tokens = 192
    cfg.rollout.max_response = 16
    cfg.rollout.serve_rows = 32

    # StarPO-S: half of the groups, no KL, clip-higher, critic
    cfg.filter.keep = 0.5
    cfg.loss.clip_high = 0.28
    cfg.optim.lr = 3e-4
    cfg.optim.critic_lr = 1e-3
    cfg.batch.minibatch_rows = 32
    cfg.batch.microbatch_rows = 32

    cfg.clone.episodes = 2048
    cfg.clone.steps = 100
    cfg.clone.lr = 3e-3

    cfg.eval.every = 10
    cfg.checkpoint.every = 20
    return cfg
