"""GRPO on SciWorld from a real checkpoint: AgentGym-RL (arXiv:2509.08755), fixed rounds.

  python -m agentrl_jax.train --config=configs/sciworld.py --workdir=runs/qwen_sciworld \\
      --config.model.path=Qwen2.5-7B-Instruct

AgentGym's 4639 games of ScienceWorld in its wording, with sizes from AgentGym-RL's script: 16 games
x 8 episodes of up to 20 rounds, answers of up to 200 tokens, 1024 + 4096 tokens in total,
minibatches of 8 games, lr 1e-6, KL .001 in the loss (k3), entropy bonus .001, temperature 1, 2120
games for 10 epochs. The reward is a step's change of a score from 0 to 100; focusing on the wrong
object ends an episode with -100. A score of 100 is a success. Games are split by a digest of their
numbers. AgentGym's split is three lists of its item ids, for train, validation and test (with
--config.sciworld.shifted=True, ids from a version without one of the tasks):
  --config.sciworld.item_files="('train.json', 'test.json', 'test.json')"

Needs Java 17. The run starts a server of eight processes, each with one JVM of up to 1 GB for 16
simulators; --config.sciworld.urls="('http://10.0.0.2:8000',)" uses others (AgentGym's, or ours).
ScalingInter-RL's script is --config.curriculum.rounds='(10, 20, 30)' with 8192 tokens after the
first 1024 (--config.env.max_turns=30 --config.rollout.max_tokens=9216).

Hardware: never run on an accelerator.
Time: not known.
Score: not known. The paper prints 50.5 % (7B) of 200 games, 1.5 % before training.
"""

from configs import base


def get_config():
    cfg = base.get_config()
    cfg.steps = 1320
    cfg.algorithm = 'grpo'
    cfg.env.name = 'sciworld'
    cfg.env.max_turns = 20
    cfg.env.train_levels = 2120
    cfg.env.eval_levels = 200
    cfg.hosts.launch = 8
    cfg.hosts.room = 16
    cfg.hosts.max_observation = 1024

    cfg.model.dtype = 'bfloat16'
    cfg.model.remat = True
    cfg.batch.widths = 4  # most rows are far shorter than rollout.max_tokens

    cfg.rollout.num_groups = 16
    cfg.rollout.group_size = 8
    cfg.rollout.slots = 128  # environments that the servers can hold, also in validation
    cfg.rollout.max_tokens = 5120
    cfg.rollout.max_response = 200

    cfg.loss.kl_coef = 0.001
    cfg.loss.entropy_coef = 0.001
    cfg.optim.lr = 1e-6
    cfg.batch.minibatch_rows = 64
    cfg.eval.temperature = 1.0
    return cfg
