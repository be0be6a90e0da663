"""What to turn when a program does not fit: each knob with an estimate of what it saves.

Sizes of parameters, moments and caches are exact; those of activations are counted from shapes, so
the order of the knobs is meant, not the last digit. Compile again after a change.
"""

import dataclasses

import jax
import jax.numpy as jnp

from agentrl_jax.machine import sharding
from agentrl_jax.planning import programs
from agentrl_jax.planning.programs import Shapes


@dataclasses.dataclass(frozen=True)
class Knob:
    """A change of the config and the bytes a device that it saves where memory is tightest."""

    setting: str
    saves: int


def knobs(shapes: Shapes, tightest: str) -> list[Knob]:
    """Changes that save memory in the program 'collect' or 'learn', the largest saving first."""
    options = _of_state(shapes)
    options += _of_collect(shapes) if tightest == 'collect' else _of_learn(shapes)
    return sorted((k for k in options if k.saves > 0), key=lambda k: -k.saves)


def _of_state(shapes: Shapes) -> list[Knob]:
    cfg, mesh = shapes.cfg, shapes.mesh
    state = programs.device_bytes(shapes.state)
    reference = programs.device_bytes(shapes.frozen.reference)
    frozen = programs.device_bytes(shapes.frozen)
    fsdp, options = mesh.devices.size // mesh.shape['tensor'], []
    if fsdp > mesh.shape['fsdp']:
        share = 1 - mesh.shape['fsdp'] / fsdp
        options.append(Knob(f'mesh.fsdp={fsdp}', int((state + frozen) * share)))
    critic = (shapes.state.critic_params, shapes.state.critic_opt_state)
    if shapes.state.critic_params is not None:
        saving = programs.device_bytes(critic)
        options.append(Knob('critic.share_backbone=True', saving))
    if reference:
        options.append(Knob('loss.kl_coef=0 (no reference model)', reference))
    if not cfg.lora.rank:  # the policy's parameters stay, as the base of policy and critic
        left = programs.device_bytes(shapes.state.params)
        options.append(Knob('lora.rank=64', state + reference - left))
    return options


def _of_collect(shapes: Shapes) -> list[Knob]:
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    shards, tensor = sharding.row_shards(mesh), mesh.shape['tensor']
    width = jnp.dtype(config.dtype).itemsize
    episodes = cfg.rollout.num_groups * cfg.rollout.group_size
    slots = cfg.rollout.slots or episodes
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    cache = slots // shards * cfg.rollout.max_tokens * entry // tensor
    policy = sum(x.size for x in jax.tree.leaves(shapes.state.params)) * width // tensor
    options = []
    half = slots // 2 // shards * shards
    if half:
        saving = cache * (slots - half) // slots
        options.append(Knob(f'rollout.slots={half} (slower rollouts)', saving))
    if config.num_kv_heads % (2 * tensor) == 0 and shards > 1:
        # Twice the rows a shard, each with half of the heads: the cache stays, weights halve.
        options.append(Knob(f'mesh.tensor={2 * tensor} (weights of rollouts)', policy // 2))
    if width == 4:
        options.append(Knob('model.dtype=bfloat16', (cache + policy) // 2))
    return options


def _of_learn(shapes: Shapes) -> list[Knob]:
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    shards, tensor = sharding.row_shards(mesh), mesh.shape['tensor']
    width = jnp.dtype(config.dtype).itemsize
    rows = cfg.batch.microbatch_rows
    tokens = rows // shards * cfg.rollout.max_tokens
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inside = (4 * config.hidden_size + heads + 3 * config.intermediate_size) * width
    scores = config.num_heads * cfg.rollout.max_tokens * (4 + width)
    layer = tokens * (inside + scores) // tensor
    border = tokens * config.hidden_size * width * config.num_layers
    activations = border + layer * (1 if config.remat else config.num_layers)
    options = []
    half = rows // 2 // shards * shards
    if half:
        setting = f'batch.microbatch_rows={half}'
        options.append(Knob(setting, activations * (rows - half) // rows))
    if not config.remat:
        options.append(Knob('model.remat=True', layer * (config.num_layers - 1)))
    if width == 4:
        options.append(Knob('model.dtype=bfloat16', activations // 2))
    logits = cfg.batch.head_chunk // shards * config.vocab_size * 4 // tensor
    if cfg.batch.head_chunk >= 2 * shards:
        setting = f'batch.head_chunk={cfg.batch.head_chunk // 2}'
        options.append(Knob(setting, logits))  # logits and their gradient, half of each
    if tensor == 1 and config.num_kv_heads % 2 == 0 and shards > 1:
        options.append(Knob('mesh.tensor=2 (scores and hidden units)', layer // 2))
    return options
