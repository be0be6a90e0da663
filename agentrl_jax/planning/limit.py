"""Seconds of a step on paper: the least there can be, and an estimate of what a design takes.

Every device reads its weights once for each token that it decodes and each block that it reads, and
the cache as far as its design does; the arithmetic is that of work.py. Transfers between devices
are free. The limit (IDEAL) computes and moves nothing twice, at the peaks of hardware.py, and rows
count as long as they are. An estimate assumes shares of the peaks and a time to launch a kernel:
none of these has been measured here.
"""

import dataclasses
import math
from typing import Any

from agentrl_jax.machine import sharding
from agentrl_jax.models import Model
from agentrl_jax.planning import work
from agentrl_jax.planning.cost import Machine
from agentrl_jax.rl import widths
from agentrl_jax.run.config import Config

BYTES = 2  # of a weight, and of a channel of the cache, that a program computes with (bfloat16)
# Bytes moved a parameter in an optimiser step: weight and two moments both ways, gradient (float32)
STATE = 28
# Times that float32 scores go through memory, forwards, again and backwards, as XLA has them
SCORE_PASSES = 12
KERNELS = 14  # of a layer in a decode step (plan, h100:1)


@dataclasses.dataclass(frozen=True)
class Design:
    """How a program does it; IDEAL by default."""

    widths: int = 0  # batch.widths of an update; 0: rows as long as they are
    fused: bool = True  # attention as one kernel: no scores in memory, the cache read by length
    remat: bool = False  # each layer is computed once more for its gradient
    launch_s: float = 0.0  # to launch a kernel
    arithmetic: float = 1.0  # share of peak FLOP/s
    bandwidth: float = 1.0  # ... and of peak bytes/s

    def columns(self, length: int, most: int) -> int:
        """Tokens that an update computes of a row of `length`."""
        if not self.widths:
            return length
        return next(width for width in widths.menu(most, self.widths) if width >= length)


IDEAL = Design()


def row_tokens(cfg: Config, task: Any, answer_tokens: int) -> int:
    """Tokens of an episode with all its turns: prefix, longest prompts, answers."""
    whole = task.prefix.shape[0] + cfg.env.max_turns * (task.width + answer_tokens)
    return min(whole, cfg.rollout.max_tokens)


def seconds(
    cfg: Config,
    config: Model,
    machine: Machine,
    *,
    length: int,
    answer_tokens: int,
    design: Design = IDEAL,
) -> dict[str, float]:
    """{'collect': s, 'learn': s} of one step on one device; length: tokens of a row."""
    flops_per_s = machine.flops * machine.tensor * design.arithmetic
    bytes_per_s = machine.bandwidth * design.bandwidth

    def least(flops: float, moved: float) -> float:
        return max(flops / flops_per_s, moved / bytes_per_s)

    parts = dict(length=length, answer_tokens=answer_tokens, design=design, least=least)
    return {
        'collect': _collect(cfg, config, machine, **parts),
        'learn': _learn(cfg, config, machine, **parts),
    }


def _collect(cfg, config, machine, *, length, answer_tokens, design, least) -> float:
    weights = BYTES * config.param_count() / machine.tensor
    rows = cfg.rollout.episodes / (machine.data * machine.fsdp)
    slots = min(cfg.rollout.slots / (machine.data * machine.fsdp) or rows, rows)
    turns = cfg.env.max_turns
    decodes = math.ceil(rows / slots) * turns * answer_tokens
    parts = sharding.head_parts(machine.tensor, config.num_kv_heads)
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * BYTES / parts
    cached = length / 2 if design.fused else cfg.rollout.max_tokens
    one = work.body(config, slots, length) + work.head(config, slots)
    launches = KERNELS * config.num_layers * design.launch_s
    decoding = decodes * (least(one, weights + slots * cached * entry) + launches)
    blocks = math.ceil(rows * turns / cfg.rollout.serve_rows)
    prompts = rows * (length - turns * answer_tokens)
    return decoding + least(work.body(config, prompts, length), blocks * weights)


def _learn(cfg, config, machine, *, length, answer_tokens, design, least) -> float:
    shards = machine.data * machine.fsdp
    kept = cfg.algorithm.filter.kept(cfg.rollout.num_groups) * cfg.rollout.group_size / shards
    columns = design.columns(length, cfg.rollout.max_tokens)
    forward = work.body(config, kept * columns, columns)
    head = work.head(config, kept * cfg.env.max_turns * answer_tokens)
    own = cfg.algorithm.USES_CRITIC and not cfg.shares_backbone
    passes = cfg.batch.epochs * (1 + own)  # through a body, with its gradient
    alone = bool(cfg.algorithm.USES_CRITIC) + bool(cfg.needs_reference)  # without
    products = 2 + (not cfg.lora.rank) + design.remat
    flops = (passes * products + alone) * forward
    flops += (cfg.batch.epochs * products + bool(cfg.needs_reference)) * head
    scores = 0.0
    if not design.fused:
        square = 4 * config.num_layers * config.num_heads * columns**2 / machine.tensor
        scores = (passes * SCORE_PASSES + alone * SCORE_PASSES / 4) * kept * square
    steps = cfg.batch.epochs * max(1, round(kept * shards / cfg.batch.minibatch_rows))
    state = config.param_count() * (0 if cfg.lora.rank else STATE) * (1 + own)
    moved = steps * state / machine.fsdp / machine.tensor
    return least(flops, 0.0) + least(0.0, scores + moved)
