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
    found = _of_state(shapes)
    found += _of_collect(shapes) if tightest == 'collect' else _of_learn(shapes)
    return sorted((k for k in found if k.saves > 0), key=lambda k: -k.saves)


def _of_state(shapes: Shapes) -> list[Knob]:
    cfg, mesh = shapes.cfg, shapes.mesh
    state = programs.device_bytes(shapes.state)
    reference = programs.device_bytes(shapes.frozen.reference)
    frozen = programs.device_bytes(shapes.frozen)
    fsdp, found = mesh.devices.size // mesh.shape['tensor'], []
    if fsdp > mesh.shape['fsdp']:
        share = 1 - mesh.shape['fsdp'] / fsdp
        found.append(Knob(f'mesh.fsdp={fsdp}', int((state + frozen) * share)))
    critic = (shapes.state.critic_params, shapes.state.critic_opt_state)
    if shapes.state.critic_params is not None:
        saved = programs.device_bytes(critic)
        found.append(Knob('critic.share_backbone=True', saved))
    if reference:
        found.append(Knob('loss.kl_coef=0 (no reference model)', reference))
    if not cfg.lora.rank:  # the policy's parameters stay, as the base of policy and critic
        kept = programs.device_bytes(shapes.state.params)
        found.append(Knob('lora.rank=64', state + reference - kept))
    return found


def _of_collect(shapes: Shapes) -> list[Knob]:
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    shards, tensor = sharding.row_shards(mesh), mesh.shape['tensor']
    width = jnp.dtype(config.dtype).itemsize
    episodes = cfg.rollout.num_groups * cfg.rollout.group_size
    slots = cfg.rollout.slots or episodes
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    cache = slots // shards * cfg.rollout.max_tokens * entry // tensor
    policy = sum(x.size for x in jax.tree.leaves(shapes.state.params)) * width // tensor
    found = []
    half = slots // 2 // shards * shards
    if half:
        saved = cache * (slots - half) // slots
        found.append(Knob(f'rollout.slots={half} (slower rollouts)', saved))
    if config.num_kv_heads % (2 * tensor) == 0 and shards > 1:
        # Twice the rows a shard, each with half of the heads: the cache stays, weights halve.
        found.append(Knob(f'mesh.tensor={2 * tensor} (weights of rollouts)', policy // 2))
    if width == 4:
        found.append(Knob('model.dtype=bfloat16', (cache + policy) // 2))
    return found


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
    kept = border + layer * (1 if config.remat else config.num_layers)
    found = []
    half = rows // 2 // shards * shards
    if half:
        setting = f'batch.microbatch_rows={half}'
        found.append(Knob(setting, kept * (rows - half) // rows))
    if not config.remat:
        found.append(Knob('model.remat=True', layer * (config.num_layers - 1)))
    if width == 4:
        found.append(Knob('model.dtype=bfloat16', kept // 2))
    logits = cfg.batch.head_chunk // shards * config.vocab_size * 4 // tensor
    if cfg.batch.head_chunk >= 2 * shards:
        setting = f'batch.head_chunk={cfg.batch.head_chunk // 2}'
        found.append(Knob(setting, logits))  # logits and their gradient, half of each
    if tensor == 1 and config.num_kv_heads % 2 == 0 and shards > 1:
        found.append(Knob('mesh.tensor=2 (scores and hidden units)', layer // 2))
    return found
