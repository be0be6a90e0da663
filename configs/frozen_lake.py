"""StarPO-S on FrozenLake from a real checkpoint: RAGEN's paper (arXiv:2504.20073, branch v0423).

  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct
  python -m agentrl_jax.train --config=configs/frozen_lake.py --workdir=runs/qwen_frozen_lake \\
      --config.model.path=Qwen2.5-0.5B-Instruct

model.path is a HuggingFace folder or a .gguf file. Maps are 4x4, with ice at probability .8; one of
three moves goes in the intended direction. A step plays 8 maps x 16 episodes and keeps the 2 groups
with the most varied returns: 32 episodes, one optimiser step; no KL. The paper also trained on
observation tokens; here, only sampled tokens are trained. The prompt is from RAGEN's main branch.
Vanilla StarPO: --config.filter.keep=1.0 --config.loss.clip_high=0.2 --config.loss.kl_coef=0.001
--config.loss.kl_in=reward

Hardware: no step has finished on an accelerator (experiments/LOG.md, 27 November). Compiled for
v5e:2x4 (0.5B, mesh.fsdp=8), it fits.
Time: not known.
Score: not known. The paper prints 20.3 % (Fig 9), about what random play reaches here (21.5 %).
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.env.name = 'frozen_lake'
    cfg.frozen_lake.frozen = 0.8
    cfg.frozen_lake.success_rate = 1.0 / 3.0

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.filter.keep = 0.25
    cfg.loss.clip_high = 0.28
    cfg.loss.reward_on = 'episode'
    cfg.optim.lr = 1e-6
    cfg.optim.critic_lr = 1e-5
    cfg.batch.minibatch_rows = 32
    return cfg
