"""From a config to the parts of a run: tokenizer, model, environment, rollout, update.

Only this file and the programs a person starts (train, evaluate, ...) see the config object.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.envs import Bandit, FrozenLake, Library, Sokoban
from agentrl_jax.machine import processes, sharding
from agentrl_jax.models import critic, lora, qwen2, weights
from agentrl_jax.rl import curriculum, update
from agentrl_jax.rollout import device
from agentrl_jax.text.task import TextTask, build_task
from agentrl_jax.tokens.tokenizer import check_fits, load_tokenizer

BUNDLED_TOKENIZER = Path(__file__).parents[1] / 'tokens' / 'demo.model'
ENVIRONMENTS = ('frozen_lake', 'sokoban', 'bandit', 'library')


def build_environment(cfg: Any, split: str) -> tuple[Any, Any]:
    """(environment, its parameters with the pool of the split)."""
    levels = cfg.env.train_levels if split == 'train' else cfg.env.eval_levels
    pool = dict(num_levels=levels, seed=cfg.env.pool_seed)
    if cfg.env.name == 'frozen_lake':
        lake = cfg.frozen_lake
        env = FrozenLake(size=lake.size, observation_format=lake.observation_format)
        return env, env.make_params(
            split, frozen=lake.frozen, success_rate=lake.success_rate, **pool
        )
    if cfg.env.name == 'sokoban':
        room = cfg.sokoban
        env = Sokoban(
            dim=room.dim,
            num_boxes=room.num_boxes,
            symbols=room.symbols,
            observation_format=room.observation_format,
        )
        return env, env.make_params(split, search_depth=room.search_depth, **pool)
    if cfg.env.name == 'bandit':
        env = Bandit(pairs=cfg.bandit.pairs)
        return env, env.make_params(split, **pool)
    if cfg.env.name == 'library':
        rules = cfg.library
        env = Library(
            side=rules.side,
            tool_reward=rules.tool_reward,
            presence_reward=rules.presence_reward,
            answer_reward=rules.answer_reward,
            lookup_cost=rules.lookup_cost,
            graded=rules.graded,
        )
        return env, env.make_params(
            split, cards=rules.cards, min_hops=rules.min_hops, max_hops=rules.max_hops, **pool
        )
    raise ValueError(f'env.name={cfg.env.name!r} is not one of {", ".join(ENVIRONMENTS)}')


def build_text_task(cfg: Any, tokenizer: Any, split: str, mesh: Any) -> TextTask:
    """The environment as text, replicated over the mesh; without one, on the host."""
    env, env_params = build_environment(cfg, split)
    task = build_task(
        env,
        env_params,
        tokenizer,
        style=cfg.env.prompt,
        generation_prefix='<think>' if cfg.env.think else '<answer>',
        max_turns=cfg.env.max_turns,
        max_actions_per_turn=cfg.env.max_actions_per_turn,
        max_actions_per_episode=cfg.env.max_actions_per_episode,
        format_penalty=cfg.env.format_penalty,
        max_words=cfg.env.max_words,
        past_turns=cfg.context.summary,
    )
    device.check_budget(
        task, max_tokens=cfg.rollout.max_tokens, max_response=cfg.rollout.max_response
    )
    task = jax.tree.map(np.asarray, task)
    return task if mesh is None else sharding.replicate(task, mesh)


def turn_limit(cfg: Any, step: int) -> int:
    """Turns an episode of a training step may take: those of the curriculum, or all."""
    if not cfg.curriculum.rounds:
        return cfg.env.max_turns
    return curriculum.horizon(
        step,
        rounds=cfg.curriculum.rounds,
        stage_steps=cfg.curriculum.stage_steps,
        interpolate=cfg.curriculum.interpolate,
    )


def build_mesh(cfg: Any, devices: Any = None) -> jax.sharding.Mesh:
    """The mesh of cfg.mesh; data = -1 takes the devices that fsdp and tensor leave."""
    count = jax.device_count() if devices is None else len(devices)
    data, rest = cfg.mesh.data, cfg.mesh.fsdp * cfg.mesh.tensor
    if data == -1 and rest > 0:
        data = max(count // rest, 1)
    return sharding.make_mesh(data, cfg.mesh.fsdp, cfg.mesh.tensor, devices)


def tokenizer_source(cfg: Any) -> Path:
    """Where the tokenizer comes from: its own field, the model's folder, or this package."""
    return processes.local_path(cfg.model.tokenizer or cfg.model.path or BUNDLED_TOKENIZER)


def build_tokenizer(cfg: Any) -> Any:
    return load_tokenizer(tokenizer_source(cfg))


def lora_scale(cfg: Any) -> float:
    """What the adapters' corrections are multiplied by."""
    return cfg.lora.alpha / cfg.lora.rank if cfg.lora.rank else 1.0


def execution(cfg: Any) -> dict[str, Any]:
    """Fields of ModelConfig that say how a model computes, whatever its sizes."""
    how = cfg.model
    return dict(
        dtype=how.dtype, remat=how.remat, scan_layers=how.scan_layers, lora_scale=lora_scale(cfg)
    )


def random_model_config(cfg: Any, tokenizer: Any) -> qwen2.ModelConfig:
    """Sizes of a model that is not loaded."""
    size = cfg.model
    return qwen2.ModelConfig(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        head_dim=size.hidden_size // size.num_heads,
        tie_embeddings=size.tie_embeddings,
        rope_theta=size.rope_theta,
        **execution(cfg),
    )


def build_model(cfg: Any, tokenizer: Any, mesh: Any) -> tuple[qwen2.ModelConfig, Any]:
    """(sizes, float32 parameters laid out for training): loaded, or random from cfg.seed."""
    if cfg.model.path:
        config, params = weights.load_model(processes.local_path(cfg.model.path), mesh=mesh)
        check_fits(tokenizer, config.vocab_size)
        return dataclasses.replace(config, **execution(cfg)), params
    config = random_model_config(cfg, tokenizer)
    init = functools.partial(qwen2.init, config=config)
    key = jax.random.fold_in(jax.random.key(cfg.seed), 1)
    return config, sharding.init_sharded(init, key, sharding.TRAIN_RULES, mesh)


@struct.dataclass
class ModelFns:
    """The model as the pure functions that losses and rollouts take."""

    hidden: Any = struct.field(pytree_node=False)
    head: Any = struct.field(pytree_node=False)
    values: Any = struct.field(pytree_node=False)  # None without a critic
    value_head: Any = struct.field(pytree_node=False)  # only for a critic on the policy's states


def model_functions(cfg: Any, config: qwen2.ModelConfig, mesh: Any) -> ModelFns:
    """hidden(params, tokens, positions, attention_mask), head(params),
    values(params, critic_params, tokens, positions, attention_mask), value_head(params, hidden)."""
    rows = sharding.shard_rows(mesh)

    def hidden(params, tokens, positions, attention_mask):
        return qwen2.forward(params, config, tokens, positions, attention_mask, row_sharding=rows)

    def head(params):
        return qwen2.head_kernel(params, config)

    def own_values(params, critic_params, tokens, positions, attention_mask):
        del params
        return critic.values(
            critic_params, config, tokens, positions, attention_mask, row_sharding=rows
        )

    def value_head(params, states):
        return critic.value_from_hidden(params['value_head'], states)

    def shared_values(params, critic_params, tokens, positions, attention_mask):
        del critic_params
        return value_head(params, hidden(params, tokens, positions, attention_mask))

    if not needs_critic(cfg):
        return ModelFns(hidden=hidden, head=head, values=None, value_head=None)
    if cfg.critic.share_backbone:
        return ModelFns(hidden=hidden, head=head, values=shared_values, value_head=value_head)
    return ModelFns(hidden=hidden, head=head, values=own_values, value_head=None)


def on_base(fns: ModelFns, base: Any) -> ModelFns:
    """The functions for parameters that lack those in `base` (LoRA: all but the adapters)."""

    def whole(params):
        return {**base, **params}

    def values(params, critic_params, *rows):
        if critic_params is not None:
            critic_params = critic_params | {'backbone': whole(critic_params['backbone'])}
        return fns.values(whole(params), critic_params, *rows)

    return ModelFns(
        hidden=lambda params, *rows: fns.hidden(whole(params), *rows),
        head=lambda params: fns.head(whole(params)),
        values=None if fns.values is None else values,
        value_head=fns.value_head,
    )


def needs_critic(cfg: Any) -> bool:
    return bool(ALGORITHMS[cfg.algorithm].USES_CRITIC)


def needs_reference(cfg: Any) -> bool:
    """A reference model is kept only when some KL term or DPO needs it."""
    return cfg.loss.kl_coef > 0 or cfg.algorithm == 'dpo'


def explores(cfg: Any) -> bool:
    """Whether episodes are played by the policy of an iteration's beginning (AgentEvol)."""
    return cfg.algorithm == 'agent_evol'


def build_collect(cfg: Any, config: qwen2.ModelConfig, mesh: Any, *, split: str):
    """Jitted (params, task, episodes, key) -> (rollout, counters) over the mesh."""
    training = split == 'train'
    rows = cfg.rollout.num_groups * cfg.rollout.group_size if training else cfg.env.eval_levels
    shards = mesh.shape['data'] * mesh.shape['fsdp']
    rows = -(-rows // shards) * shards
    sample = cfg.rollout if training else cfg.eval
    config = dataclasses.replace(config, dtype=cfg.rollout.sampler_dtype or config.dtype)
    play = device.collect_on_mesh(
        mesh,
        config=config,
        slots=min(cfg.rollout.slots or rows, rows),
        serve_rows=cfg.rollout.serve_rows,
        max_tokens=cfg.rollout.max_tokens,
        max_response=cfg.rollout.max_response,
        temperature=sample.temperature,
        top_k=0 if training else sample.top_k,
        top_p=1.0 if training else sample.top_p,
        stop_at_answer=cfg.rollout.stop_at_answer,
        window=cfg.context.window,
    )

    def collect(params, task, episodes, key):
        params = lora.merge(params, config.lora_scale)
        # Before they move: whole float32 parameters are more than a small chip can hold.
        params = jax.tree.map(lambda x: x.astype(config.dtype), params)
        layout = sharding.specs(params, sharding.ROLLOUT_RULES, mesh)
        params = jax.lax.with_sharding_constraint(params, layout)
        return play(params, task, episodes, key)

    return jax.jit(collect)


def draw_episodes(
    key: jax.Array,
    step: jax.Array,
    first: jax.Array | int = 0,
    *,
    levels: int,
    groups: int,
    group_size: int,
    common: bool,
) -> device.Episodes:
    """Levels of a step, without repetition where the pool allows; own random streams for all.

    `first` is the number of the first stream: further rollouts of a step have streams of their own.
    """
    chosen = jax.random.choice(
        jax.random.fold_in(key, step), levels, (groups,), replace=groups > levels
    )
    row = jnp.arange(groups * group_size, dtype=jnp.int32)
    return device.Episodes(
        level=jnp.repeat(chosen.astype(jnp.int32), group_size),
        token_stream=first + row,
        world_stream=first + (row // group_size if common else row),
    )


def every_level(episodes: int, levels: int, shards: int) -> device.Episodes:
    """`episodes` episodes over the levels of a pool in turn, filled up to a multiple of shards."""
    rows = np.arange(-(-episodes // shards) * shards, dtype=np.int32)
    return device.Episodes(level=rows % levels, token_stream=rows, world_stream=rows)


def build_optimisers(cfg: Any) -> tuple:
    """Optimisers of policy and critic (the latter None without a critic)."""
    make = functools.partial(
        update.make_optimizer,
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        weight_decay=cfg.optim.weight_decay,
        max_grad_norm=cfg.optim.max_grad_norm,
        warmup_steps=cfg.optim.warmup_steps,
    )
    return make(cfg.optim.lr), make(cfg.optim.critic_lr) if needs_critic(cfg) else None


def clone_optimiser(cfg: Any):
    """AdamW with a linear decay to zero over the cloning steps."""
    schedule = optax.linear_schedule(cfg.clone.lr, 0.0, cfg.clone.steps)
    adam = optax.adamw(schedule, b1=cfg.optim.beta1, b2=cfg.optim.beta2, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def information_settings(cfg: Any) -> dict[str, Any]:
    """Keywords of mutual_information.information."""
    return dict(
        group_size=cfg.rollout.group_size,
        pairs=cfg.alarm.mi_pairs,
        turns=cfg.alarm.mi_turns,
        text=cfg.alarm.mi_text,
        low_mi=cfg.alarm.low_mi,
        low_entropy=cfg.alarm.low_entropy,
        max_response=cfg.rollout.max_response,
        microbatch_rows=cfg.batch.microbatch_rows,
        temperature=cfg.rollout.temperature,
        chunk_size=cfg.batch.head_chunk,
    )
