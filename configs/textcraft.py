"""GRPO on TextCraft from a real checkpoint: AgentGym-RL (arXiv:2509.08755), fixed rounds.

  python -m agentrl_jax.train --config=configs/textcraft.py --workdir=runs/qwen_textcraft \\
      --config.model.path=Qwen2.5-7B-Instruct

AgentGym's wording, rewards and goals of all depths, with sizes from AgentGym-RL's script: 32 goals
x 8 episodes of up to 30 rounds (20 in the paper), answers of up to 512 tokens, 512 + 10240 tokens
in total, minibatches of 8 goals, lr 1e-6, KL .001 in the loss (k3), entropy bonus .001, temperature
1, 374 goals for 30 epochs. Goals are split by a digest of their names. AgentGym's split is three
lists of its item ids, for train, validation and test:
  --config.textcraft.item_files="('train.json', 'test.json', 'test.json')"

Environments run in this process, each in a thread. --config.hosts.launch=2 with
--config.hosts.room=128 starts a server of two processes for the 256 environments of a step;
--config.textcraft.urls="('http://10.0.0.2:8000',)" uses others (AgentGym's, or ours).
ScalingInter-RL's script is --config.curriculum.rounds='(10, 20, 30)'.

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints 89 % (7B) of 100 goals, 42 % before training.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 330
    cfg.algorithm = 'grpo'
    cfg.env.name = 'textcraft'
    cfg.env.max_turns = 30
    cfg.env.train_levels = 374
    cfg.env.eval_levels = 100
    cfg.hosts.max_observation = 1088  # the longest first observation has 1058 Qwen tokens

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 32
    cfg.rollout.group_size = 8
    cfg.rollout.max_tokens = 10752
    cfg.rollout.max_response = 512

    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.001
    cfg.optim.lr = 1e-6
    cfg.batch.minibatch_rows = 64
    cfg.eval.temperature = 1.0
    return cfg
