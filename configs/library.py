"""MT-GRPO on the card catalogue from a real checkpoint: tool use in two to five turns.

  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-Instruct
  python -m agentrl_jax.train --config=configs/library.py --workdir=runs/qwen_library \\
      --config.model.path=Qwen2.5-0.5B-Instruct

Optimiser and batch are from MT-GRPO's code (arXiv:2505.11821 v1): 16 questions x 21 episodes,
two passes over each, lr 1e-6, betas .9 and .99, 20 steps of warm-up, gradient norm .1, no KL, no
entropy bonus, temperature .9; 150 rollouts. It also sampled only from the top 50 tokens and
searched an encyclopedia. Here, a question needs one to four lookups in a table of eight cards. The
format penalty per turn is from the paper's second version.

Hardware: never run on an accelerator.
Time: not known.
Score: not known; random play reaches 6.1 %, the oracle 100 %. The paper's task is different.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 150
    cfg.algorithm = 'mt_grpo'
    cfg.turn_credit.outcome = 'answer'
    cfg.env.name = 'library'
    cfg.env.prompt = 'tools'
    cfg.env.max_turns = 5
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 5
    cfg.env.format_penalty = -0.2
    cfg.library.min_hops = 1
    cfg.library.max_hops = 4

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 16
    cfg.rollout.group_size = 21
    cfg.rollout.max_tokens = 3072
    cfg.rollout.max_response = 400
    cfg.rollout.temperature = 0.9

    cfg.loss.entropy_coef = 0.0
    cfg.optim.lr = 1e-6
    cfg.optim.beta2 = 0.99
    cfg.optim.max_grad_norm = 0.1
    cfg.optim.warmup_steps = 20
    cfg.batch.minibatch_rows = 336
    cfg.batch.epochs = 2
    cfg.eval.temperature = 0.9
    return cfg
