"""Turn-GRPO on pages of MiniWoB++ in Chromium with the demo's small policy, two CPU cores.

  apt-get install chromium && pip install miniwob==1.1.0 playwright
  python -m agentrl_jax.train --config=configs/demo_miniwob.py --workdir=runs/miniwob

Pages are dialogs with two or three buttons. The task is to click the named one; any other button
ends the episode. Pages are generated from seeds; a tenth of the seeds is held out. A small model
can read the pages, since the system message is one sentence, and the tokenizer has a token for each
element number, each word and most lines. Half of the cloned turns are from the expert, half are
random clicks. Pages with a button among other lines (click-button) need more training than a few
minutes (experiments/LOG.md).

Hardware: 2 shared CPU cores.
Time: 12 to 14 minutes next to other work, a quarter of them demonstrations.
Score: seeds 0 to 2: 62.5, 67.2 and 70.3 % of 64 held-out pages after cloning, 81.2, 87.5 and 85.9 %
after 25 steps.
"""

from configs import demo_cloned


def get_config():
    cfg = demo_cloned.get_config()
    cfg.steps = 25
    cfg.env.name = 'miniwob'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 720
    cfg.env.eval_levels = 64
    cfg.hosts.prompt = 'short'
    cfg.miniwob.tasks = ('click-dialog-2',)
    cfg.miniwob.seeds = 800
    cfg.hosts.answer_prefix = '```'
    cfg.hosts.max_observation = 64
    cfg.hosts.read_tokens = 16

    # A page takes 70 MB, and an action 50 ms: use few episodes, and train on all of them
    cfg.algorithm = 'turn_grpo'
    cfg.env.format_penalty = 0.0
    cfg.rollout.num_groups = 4
    cfg.rollout.slots = 8
    cfg.rollout.max_tokens = 192
    cfg.rollout.max_response = 10

    cfg.optim.lr = 3e-4
    cfg.filter.keep = 1.0
    cfg.loss.clip_high = 0.2
    cfg.loss.entropy_coef = 0.0
    cfg.batch.minibatch_rows = 32
    cfg.batch.microbatch_rows = 32

    cfg.clone.episodes = 512
    cfg.clone.oracle = 0.5
    cfg.clone.steps = 100
    cfg.eval.every = 5
    return cfg
