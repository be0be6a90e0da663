"""The least seconds of a step on paper: rows count as long as they are, not as their arrays.

Every device reads its weights once for each token that it decodes and each block that it reads, and
the cache as far as it is filled; the arithmetic is that of work.py. Transfers between devices are
free, and nothing is computed twice.
"""

import math
from typing import Any

from agentrl_jax.models import Model
from agentrl_jax.planning import work
from agentrl_jax.planning.cost import Machine
from agentrl_jax.run.config import Config

CACHED = 2  # bytes of a cache entry's channel, and of a weight that a program computes with
# Bytes moved a parameter in an optimiser step: weight and two moments both ways, gradient (float32)
STATE = 28


def row_tokens(cfg: Config, task: Any, answer_tokens: int) -> int:
    """Tokens of an episode with all its turns: prefix, longest prompts, answers."""
    whole = task.prefix.shape[0] + cfg.env.max_turns * (task.width + answer_tokens)
    return min(whole, cfg.rollout.max_tokens)


def seconds(
    cfg: Config, config: Model, machine: Machine, *, length: int, answer_tokens: int
) -> dict[str, float]:
    """{'collect': s, 'learn': s} of one step on one device; length: tokens of a row."""
    shards = machine.data * machine.fsdp
    parameters = config.param_count()

    def least(flops: float, moved: float) -> float:
        return max(flops / machine.tensor / machine.flops, moved / machine.bandwidth)

    weights = CACHED * parameters / machine.tensor
    rows = cfg.rollout.episodes / shards
    slots = min(cfg.rollout.slots / shards or rows, rows)
    turns = cfg.env.max_turns
    decodes = math.ceil(rows / slots) * turns * answer_tokens
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * CACHED / machine.tensor
    one = work.body(config, slots, length) + work.head(config, slots)
    collect = decodes * least(one, weights + slots * length / 2 * entry)
    blocks = math.ceil(rows * turns / cfg.rollout.serve_rows)
    prompts = rows * (length - turns * answer_tokens)
    collect += least(work.body(config, prompts, length), blocks * weights)

    kept = cfg.algorithm.filter.kept(cfg.rollout.num_groups) * cfg.rollout.group_size / shards
    tokens, trained = kept * length, kept * turns * answer_tokens
    forward = work.body(config, tokens, length)
    head = work.head(config, trained)
    backward = 1 if cfg.lora.rank else 2
    epochs, own = cfg.batch.epochs, cfg.algorithm.USES_CRITIC and not cfg.shares_backbone
    flops = epochs * (1 + backward) * (forward * (1 + own) + head)
    flops += forward * bool(cfg.algorithm.USES_CRITIC) + (forward + head) * bool(
        cfg.needs_reference
    )
    steps = epochs * max(1, round(kept * shards / cfg.batch.minibatch_rows))
    state = parameters * (0 if cfg.lora.rank else STATE) * (1 + own) / machine.fsdp / machine.tensor
    learn = least(flops, 0.0) + least(0.0, steps * state)
    return {'collect': collect, 'learn': learn}
