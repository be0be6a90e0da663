"""GRPO on questions with a search engine, from a real checkpoint: AgentGym-RL's DeepSearch.

  python -m agentrl_jax.train --config=configs/deepsearch.py --workdir=runs/qwen_deepsearch \\
      --config.model.path=Qwen2.5-7B-Instruct

By default, questions are about countries (`pip install agentrl_jax[search]`). The paper
(arXiv:2509.08755) uses Search-R1's questions and 21 million Wikipedia passages behind a dense
retriever: --config.search.questions="('train.jsonl', 'dev.jsonl')" and Search-R1's server,
--config.search.corpus=http://host:8000. Prompt, replies, rewards and sizes are from its script: 32
questions x 4 episodes of up to 5 rounds, answers of up to 512 tokens, three passages per search,
minibatches of 8 questions, lr 1e-6, KL .001 in the loss (k3), temperature 1.

The policy may try again after a wrong answer, so an exact match in any round is a success. For
a single answer, as in Search-R1: --config.search.retries=False. ScalingInter-RL:
--config.curriculum.rounds='(5, 8, 10)' --config.curriculum.stage_steps=100
--config.env.max_turns=10 --config.rollout.max_tokens=16384

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints 34.0 % (7B) of 400 questions, 18.8 % before training, and 38.3 %
with ScalingInter-RL.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 370
    cfg.algorithm = 'grpo'
    cfg.env.name = 'search'
    cfg.env.max_turns = 5
    cfg.env.train_levels = 8192
    cfg.search.dialect = 'agentgym'
    cfg.hosts.stop = ('</search>', '</answer>')
    cfg.hosts.max_observation = 1024

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 32
    cfg.rollout.group_size = 4
    cfg.rollout.max_tokens = 9216
    cfg.rollout.max_response = 512

    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.0
    cfg.optim.lr = 1e-6
    cfg.batch.minibatch_rows = 32
    cfg.eval.temperature = 1.0
    return cfg
