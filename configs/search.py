"""MT-GRPO with a search engine, from a real checkpoint (arXiv:2505.11821 v1).

  hf download Qwen/Qwen2.5-7B --local-dir Qwen2.5-7B
  python -m agentrl_jax.train --config=configs/search.py --workdir=runs/qwen_search \\
      --config.model.path=Qwen2.5-7B --config.turn_credit.mode=mt_v1

By default, questions are about countries (`pip install agentrl_jax[search]`). The paper uses
TriviaQA and Wikipedia: --config.search.questions="('train.jsonl', 'validation.jsonl')" and
--config.search.corpus=http://127.0.0.1:8000 (a server started by Search-R1's scripts, or the folder
of an index). Two-hop questions, with one search per hop:
--config.search.hops='(1, 2)' --config.search.calls=3

Rewards, prompt and optimiser are from its code: up to .7 for the search, 1.9 for answer and
format; 16 questions x 21 episodes, two passes over each, lr 1e-6, betas .9 and .99, 20 steps of
warm-up, gradient norm .1, no KL, temperature .9; 150 rollouts. Differences: the prompt has new
wording, and sampling uses all tokens, not the top 50. An article is cut to 512 tokens, so that the
second turn always fits (the paper's code cuts the second turn instead). Punctuation and articles
are removed before answers are compared; --config.search.normaliser=as_written compares as the
paper's code does.

Without mt_v1, turns are credited as in a later paper (mt_cumulative, arXiv:2604.02869), which is
the same for two turns. Its baselines are --config.turn_credit.mode=or (GRPO-OR) and mr (GRPO-MR).
configs/sweeps/search.py runs both, this config and MT-PPO, the method of the paper's second
version, with one command.

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints an exact match of 50.1 % on TriviaQA, 33.5 % for GRPO-MR and 0
for GRPO-OR.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 150
    cfg.algorithm = 'mt_grpo'
    cfg.env.name = 'search'
    cfg.env.max_turns = 3
    cfg.env.train_levels = 8192
    cfg.search.dialect = 'mt_grpo'
    cfg.search.rewards = 'mt_grpo'
    cfg.search.normaliser = 'triviaqa'
    cfg.search.retries = False
    cfg.search.turns = cfg.env.max_turns
    cfg.search.calls = 2
    cfg.search.hops = (1,)
    cfg.hosts.stop = ('</tool>', '</answer>')
    cfg.hosts.max_observation = 512

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 16
    cfg.rollout.group_size = 21
    cfg.rollout.max_tokens = 3584
    cfg.rollout.max_response = 512
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
