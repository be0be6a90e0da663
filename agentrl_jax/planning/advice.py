"""Settings that reduce memory, each with an estimate of what it saves.

Sizes of parameters, moments and caches are exact. Activations are estimated from shapes: trust the
order of the settings, not the last digit. Compile again after a change.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentrl_jax.machine import sharding
from agentrl_jax.models import Model
from agentrl_jax.models.attention import SCORE_BYTES
from agentrl_jax.planning import programs
from agentrl_jax.planning.programs import Shapes
from agentrl_jax.run import parts
from agentrl_jax.run.config import Config


@dataclasses.dataclass(frozen=True)
class Knob:
    """A config change and the bytes per device by which it lowers peak memory."""

    setting: str
    saves: int


def knobs(shapes: Shapes, tightest: str) -> list[Knob]:
    """Return changes that save memory in 'collect' or 'learn', the largest saving first."""
    options = _of_state(shapes)
    options += _of_collect(shapes) if tightest == 'collect' else _of_learn(shapes)
    return sorted((k for k in options if k.saves > 0), key=lambda k: -k.saves)


def cache_bytes(cfg: Config, config: Model, mesh: Mesh, rows: int) -> int:
    """Bytes per device of the keys and values of `rows` slots, each with a full conversation."""
    width = jnp.dtype(cfg.rollout.sampler_dtype or config.dtype).itemsize
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    shards = sharding.row_shards(mesh)
    longest = max(getattr(world, 'context', 0) for world in cfg.worlds)  # of a conversation
    tokens = longest or cfg.rollout.max_tokens
    parts_of_heads = sharding.head_parts(mesh.shape['tensor'], config.num_kv_heads)
    return max(rows // shards, 1) * tokens * entry // parts_of_heads


def layer_bytes(cfg: Config, config: Model, mesh: Mesh) -> int:
    """Bytes per device that the backward pass keeps of one layer for a micro-batch."""
    width = jnp.dtype(config.dtype).itemsize
    rows = cfg.batch.microbatch_rows // sharding.row_shards(mesh)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inside = (4 * config.hidden_size + heads + 3 * config.intermediate_size) * width
    scores = config.num_heads * cfg.rollout.max_tokens * (4 + width)
    at_once = SCORE_BYTES // (4 * config.num_heads * cfg.rollout.max_tokens**2)
    again = mesh.devices.flat[0].platform == 'cpu' and rows > max(at_once, 1)
    unit = cfg.batch.prefix_rows
    if again or (unit == 1 and parts.fused(cfg, config, mesh)):
        scores = 0  # recomputed (attention.attend_rows) or never stored (kernels)
    # A rest attends to the lead and to at most as many tokens of its own row.
    scores = scores * (2 * unit - 1) // unit
    return rows * cfg.rollout.max_tokens * (inside + scores) // mesh.shape['tensor']


def activation_bytes(cfg: Config, config: Model, mesh: Mesh) -> int:
    """Bytes per device that the backward pass keeps for a micro-batch."""
    width = jnp.dtype(config.dtype).itemsize
    tokens = cfg.batch.microbatch_rows // sharding.row_shards(mesh) * cfg.rollout.max_tokens
    border = tokens * config.hidden_size * width * config.num_layers
    return border + layer_bytes(cfg, config, mesh) * (1 if config.remat else config.num_layers)


def logit_bytes(cfg: Config, config: Model, mesh: Mesh) -> int:
    """Bytes per device of the float32 logits of a chunk of tokens."""
    tokens = cfg.batch.head_chunk // sharding.row_shards(mesh)
    return tokens * config.vocab_size * 4 // mesh.shape['tensor']


def _of_state(shapes: Shapes) -> list[Knob]:
    mesh, state, frozen = shapes.mesh, shapes.state, shapes.frozen
    reference = programs.device_bytes(frozen.reference)
    critic = programs.device_bytes((state.critic_params, state.critic_opt_state))
    fsdp = mesh.devices.size // mesh.shape['tensor']
    spread = programs.device_bytes((state, frozen)) * (1 - mesh.shape['fsdp'] / fsdp)
    # The policy's parameters remain as the frozen base of policy and critic
    adapted = programs.device_bytes(state) + reference - programs.device_bytes(state.params)
    return [
        Knob(f'mesh.fsdp={fsdp}', int(spread)),
        Knob('critic.share_backbone=True', critic),
        Knob('loss.kl_coef=0 (no reference model)', reference),
        Knob('lora.rank=64', 0 if shapes.cfg.lora.rank else adapted),
    ]


def _of_collect(shapes: Shapes) -> list[Knob]:
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    shards, tensor = sharding.row_shards(mesh), mesh.shape['tensor']
    width = jnp.dtype(config.dtype).itemsize
    slots = cfg.rollout.slots or cfg.rollout.episodes
    cache = cache_bytes(cfg, config, mesh, slots)
    policy = sum(x.size for x in jax.tree.leaves(shapes.state.params)) * width // tensor
    options = []
    half = slots // 2 // shards * shards
    if half:
        saving = cache * (slots - half) // slots
        options.append(Knob(f'rollout.slots={half} (slower rollouts)', saving))
    if config.num_kv_heads % (2 * tensor) == 0 and shards > 1:
        # Twice the rows per shard with half the heads each: same cache, half the weights.
        options.append(Knob(f'mesh.tensor={2 * tensor} (weights of rollouts)', policy // 2))
    if width == 4:
        options.append(Knob('model.dtype=bfloat16', (cache + policy) // 2))
    return options


def _of_learn(shapes: Shapes) -> list[Knob]:
    cfg, config, mesh = shapes.cfg, shapes.config, shapes.mesh
    shards, tensor = sharding.row_shards(mesh), mesh.shape['tensor']
    width = jnp.dtype(config.dtype).itemsize
    rows, layer = cfg.batch.microbatch_rows, layer_bytes(cfg, config, mesh)
    activations = activation_bytes(cfg, config, mesh)
    options = []
    half = rows // 2 // shards * shards
    if half:
        setting = f'batch.microbatch_rows={half}'
        options.append(Knob(setting, activations * (rows - half) // rows))
    if not config.remat:
        options.append(Knob('model.remat=True', layer * (config.num_layers - 1)))
    if width == 4:
        options.append(Knob('model.dtype=bfloat16', activations // 2))
    logits = logit_bytes(cfg, config, mesh)
    if cfg.batch.head_chunk >= 2 * shards:
        setting = f'batch.head_chunk={cfg.batch.head_chunk // 2}'
        options.append(Knob(setting, logits))  # half the logits and half their gradient
    if tensor == 1 and config.num_kv_heads % 2 == 0 and shards > 1:
        options.append(Knob('mesh.tensor=2 (scores and hidden units)', layer // 2))
    return options
