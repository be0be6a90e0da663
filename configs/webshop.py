"""GRPO on WebShop from a real checkpoint, with AgentGym's rounds and AgentGym-RL's optimiser.

  python -m agentrl_jax.train --config=configs/webshop.py --workdir=runs/qwen_webshop \\
      --config.model.path=Qwen2.5-7B-Instruct

AgentGym (arXiv:2406.04151) plays up to ten rounds, trains on 3,930 goals of WebShop's file of 1,000
products and tests on 200. AgentGym-RL (arXiv:2509.08755) has no script for it, so sizes are from
its other environments: 32 goals x 8 episodes, answers of up to 512 tokens, minibatches of 8 goals,
lr 1e-6, KL .001 in the loss (k3). The prompt has new wording, and pages list clickable elements;
AgentGym's do not: --config.shop.list_actions=False.

Products are generated from a seed. For WebShop's products and AgentGym's goals:
  --config.shop.files="('items_shuffle_1000.json', 'items_ins_v2_1000.json')"
  --config.shop.item_files="('webshop_train.json', 'webshop_test.json', 'webshop_test.json')"
RAGEN pays 1 for a score of 1, otherwise 0, in nine turns: --config.shop.rewards=success
--config.env.max_turns=9.

Hardware: never run on an accelerator.
Time: not known.
Score: not known.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 330
    cfg.algorithm = 'grpo'
    cfg.env.name = 'shop'
    cfg.env.max_turns = 10
    cfg.env.train_levels = 3930
    cfg.env.eval_levels = 200
    cfg.hosts.max_observation = 1024

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 32
    cfg.rollout.group_size = 8
    cfg.rollout.max_tokens = 16384
    cfg.rollout.max_response = 512

    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.001
    cfg.optim.lr = 1e-6
    cfg.batch.minibatch_rows = 64
    cfg.eval.temperature = 1.0
    return cfg
