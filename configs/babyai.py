"""GRPO on BabyAI from a real checkpoint: AgentGym-RL (arXiv:2509.08755), fixed rounds.

  python -m agentrl_jax.train --config=configs/babyai.py --workdir=runs/qwen_babyai \\
      --config.model.path=Qwen2.5-7B-Instruct

All forty levels with AgentGym's texts, numbered objects and score. Sizes are from its script: 16
tasks x 8 episodes of up to 20 rounds, one action each, answers of up to 200 tokens, minibatches of
8 tasks, lr 1e-6, KL .001 in the loss (k3), temperature 1, 810 tasks, 500 steps. Differences: the
rules in the prompt have new wording, answers are between tags, and splits share no map.
--config.babyai.train_ids and test_ids use its own lists of numbers instead.

ScalingInter-RL's script is --config.curriculum.rounds='(6, 13, 20)' with 32 tasks x 4 episodes
(--config.rollout.num_groups=32 --config.rollout.group_size=4), 512-token answers and 8192 tokens.
To end episodes as MiniGrid does, and keep the order of instructions:
--config.babyai.agentgym_rewards=False --config.babyai.wording=full

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints 92.2 % (7B) of 90 tasks, 66.7 % before training.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 500
    cfg.algorithm = 'grpo'
    cfg.env.name = 'babyai'
    cfg.env.prompt = 'menu'
    cfg.env.max_turns = 20
    cfg.env.max_actions_per_turn = 1
    cfg.env.max_actions_per_episode = 20
    cfg.env.format_penalty = 0.0
    cfg.env.train_levels = 810
    cfg.env.eval_levels = 240
    cfg.babyai.actions = 'macro'
    cfg.babyai.wording = 'agentgym'
    cfg.babyai.agentgym_rewards = True

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 16
    cfg.rollout.group_size = 8
    cfg.rollout.max_tokens = 5120
    cfg.rollout.max_response = 200

    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.0
    cfg.optim.lr = 1e-6
    cfg.batch.minibatch_rows = 64
    cfg.eval.temperature = 1.0
    return cfg
