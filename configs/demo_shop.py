"""Turn-GRPO on a small WebShop with the demo's small policy, two CPU cores.

  python -m agentrl_jax.train --config=configs/demo_shop.py --workdir=runs/shop

Each goal has its own shop of three products, each with one option. The policy must search for the
kind of product, click the result, choose the option and buy: four of at most five turns. Pages are
WebShop's without lists of actions. Products have one of eight names, drawn again for each shop.
Each goal word is one token, so the policy has to learn where to copy from. A purchase without the
right option earns more than half, since the reward is WebShop's score.

Seven of ten cloned turns are from the oracle. The others are random: they search for words of the
instruction, or click any button.

Hardware: one of two shared CPU cores.
Time: 9 to 18 minutes next to other work, most of them cloning.
Score: seeds 0 to 2: 28.5, 26.2 and 25.0 % of 256 held-out goals after cloning, 87.5, 80.5 and
81.6 % after 60 steps; random play 0.6 %, oracle 100 %. After 400 cloning steps one seed in three
had not learned to copy (9.0 %) and ended at 19.9 %.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.steps = 60
    cfg.env.name = 'shop'
    cfg.env.max_turns = 5
    cfg.env.train_levels = 4096
    cfg.env.eval_levels = 256
    cfg.hosts.prompt = 'short'
    cfg.shop.list_actions = False
    cfg.shop.stalls = 4096
    cfg.shop.products = 3
    cfg.hosts.answer_prefix = 'Action: '
    cfg.hosts.max_observation = 64
    cfg.hosts.read_tokens = 16

    cfg.algorithm = 'turn_grpo'
    cfg.env.format_penalty = 0.0
    cfg.rollout.num_groups = 16
    cfg.rollout.max_tokens = 256
    cfg.rollout.max_response = 16

    cfg.filter.keep = 1.0
    cfg.loss.clip_high = 0.2
    cfg.loss.entropy_coef = 0.0
    cfg.batch.minibatch_rows = 128
    cfg.batch.microbatch_rows = 64
    cfg.batch.widths = 2

    cfg.clone.oracle = 0.7
    cfg.clone.episodes = 4096
    cfg.clone.steps = 800
    cfg.eval.every = 10
    return cfg
