"""Build the parts of a run: mesh, environment, functions of the model, rollout, optimisers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs import simulation
from agentrl_jax.envs.base import build
from agentrl_jax.machine import sharding
from agentrl_jax.models import Model, kernels, lora
from agentrl_jax.models.functions import ModelFns, model_functions
from agentrl_jax.rollout import device, host, rewards, windows
from agentrl_jax.rollout.openings import SharedPrompts
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.sampling import Sampler
from agentrl_jax.rollout.slots import RolloutSettings, Schedule
from agentrl_jax.run import hosts, usage
from agentrl_jax.run.config import Config
from agentrl_jax.text.conversation import Task
from agentrl_jax.text.task import TextTask, build_task
from agentrl_jax.tokens.tokenizer import Tokenizer

TRANSPOSE_FROM = 2**24  # parameters; larger models do not fit into a core's caches while sampling


def build_environment(cfg: Config, split: str) -> tuple[Any, Any]:
    """Return (environment, its parameters with the pool of the split)."""
    if cfg.env.mix:
        raise ValueError(
            f'env.mix={cfg.env.mix!r} is only for train: set it to () and env.name to one of '
            f'{", ".join(cfg.env.worlds)}'
        )
    (world,) = cfg.worlds
    levels = cfg.env.train_levels if split == 'train' else cfg.env.eval_levels
    return build(world, split, num_levels=levels, seed=cfg.env.pool_seed)


def build_text_task(cfg: Config, tokenizer: Tokenizer, split: str, mesh: Any) -> Task:
    """Build the environment as text, replicated over the mesh; without a mesh, on the host."""
    make = hosts.build_task if cfg.on_hosts else device_task
    task = make(cfg, tokenizer, split, *build_environment(cfg, split))
    enough = check_budget(
        task, max_tokens=cfg.rollout.max_tokens, max_response=cfg.rollout.max_response
    )
    first = split == 'train'  # the pools of other splits have the same texts
    possible, known = task.grammar.answers if first and cfg.rollout.constrain else (0, 0)
    if possible < known:
        usage.warn(
            f'rollout.max_response allows only {possible} of the {known} answers of '
            f'{cfg.env.name}; longer ones are never sampled'
        )
    if first and enough > cfg.rollout.max_tokens:
        usage.warn(
            f'rollout.max_tokens={cfg.rollout.max_tokens} may end episodes of '
            f'{cfg.env.name} before their {task.max_turns} turns are played '
            f'(rollout/token_budget_stop counts them); {enough} tokens are always enough'
        )
    task = jax.tree.map(np.asarray, task)
    return task if mesh is None else sharding.replicate(task, mesh)


def check_budget(task: Task, *, max_tokens: int, max_response: int) -> int:
    """Return the worst-case tokens of an episode; ValueError if its first turn does not fit."""
    prefix, turn = task.prefix.shape[0], task.width + max_response
    if prefix + turn > max_tokens:
        raise ValueError(
            f'rollout.max_tokens={max_tokens} is too small: the prompt prefix takes '
            f'{prefix} tokens, a turn prompt up to {task.width} and an answer '
            f'{max_response}; set it to at least {prefix + turn}'
        )
    return prefix + task.max_turns * turn


def device_task(
    cfg: Config, tokenizer: Tokenizer, split: str, env: Any, env_params: Any
) -> TextTask:
    """Build an environment on the device as text."""
    needed = split == 'train' and any(part.needs_plans(cfg) for part in cfg.extensions)
    plans = None
    if needed or cfg.env.hint == 'plan':
        plans = solutions(env, env_params, cfg.env.max_actions_per_episode)
    return build_task(
        env,
        env_params,
        tokenizer,
        style=cfg.env.prompt,
        generation_prefix=cfg.answer_opening,
        max_turns=cfg.env.max_turns,
        max_actions_per_turn=cfg.env.max_actions_per_turn,
        max_actions_per_episode=cfg.env.max_actions_per_episode,
        format_penalty=cfg.env.format_penalty,
        max_words=cfg.env.max_words,
        past_turns=cfg.context.summary,
        agent=cfg.agent.build(),
        constrain=cfg.rollout.constrain,
        max_response=cfg.rollout.max_response,
        plans=plans,
        shows_hint=cfg.env.hint == 'plan',
    )


def solutions(env: Any, env_params: Any, budget: int) -> np.ndarray:
    """Return simulation.solutions; ValueError for an environment without an expert."""
    try:
        return simulation.solutions(env, env_params, budget)
    except simulation.NoExpert as error:
        raise ValueError(
            f'env.hint or an extension needs expert plans, but {env.name} has no expert: set '
            'env.hint=none, and do not use the extension'
        ) from error


def build_mesh(cfg: Config, devices: Any = None) -> jax.sharding.Mesh:
    """Build the mesh of cfg.mesh; data = -1 uses all devices that fsdp and tensor leave."""
    count = jax.device_count() if devices is None else len(devices)
    data, rest = cfg.mesh.data, cfg.mesh.fsdp * cfg.mesh.tensor
    if data == -1 and rest > 0:
        data = max(count // rest, 1)
    return sharding.make_mesh(data, cfg.mesh.fsdp, cfg.mesh.tensor, devices)


def build_functions(cfg: Config, config: Model, mesh: Any, *, critic: bool = True) -> ModelFns:
    """Return a model as pure functions. critic: include the run's critic, if it has one."""
    return model_functions(
        dataclasses.replace(config, fused=fused(cfg, config, mesh)),
        sharding.shard_rows(mesh),
        has_critic=critic and cfg.algorithm.USES_CRITIC,
        shares_backbone=critic and cfg.critic.share_backbone,
    )


def fused(cfg: Config, config: Model, mesh: Any) -> str:
    """Return the kind of attention kernels for this model on these devices (Model.fused)."""
    if cfg.model.attention == 'plain':
        return ''
    return kernels.kind_for(mesh.devices.flat[0].platform, config.dtype, config.head_dim)


def uses_transposed_kernels(config: Model, mesh: Any) -> bool:
    """Return whether rollouts use transposed copies of the kernels."""
    on_cpu = mesh.devices.flat[0].platform == 'cpu' and mesh.shape['tensor'] == 1
    return on_cpu and config.param_count() >= TRANSPOSE_FROM


def rollout_settings(cfg: Config, model: Model, mesh: Any, *, training: bool) -> RolloutSettings:
    """Return the settings of training rollouts, or of validation rollouts."""
    rows = cfg.rollout.episodes if training else cfg.env.eval_levels * cfg.eval.samples
    shards = mesh.shape['data'] * mesh.shape['fsdp']
    rows = -(-rows // shards) * shards
    model = dataclasses.replace(
        model,
        dtype=cfg.rollout.sampler_dtype or model.dtype,
        transposed=uses_transposed_kernels(model, mesh),
    )
    model = dataclasses.replace(model, fused=fused(cfg, model, mesh))
    sampler = Sampler(cfg.rollout.temperature)
    if not training:
        sampler = Sampler(cfg.eval.temperature, cfg.eval.top_k, cfg.eval.top_p)
    members = cfg.rollout.group_size if training else cfg.eval.samples
    shares = members > 1 and not cfg.context.window and not cfg.on_hosts
    settings = RolloutSettings(
        player=Player(model),
        slots=min(cfg.rollout.slots or rows, rows),
        serve_rows=cfg.rollout.serve_rows,
        max_tokens=cfg.rollout.max_tokens,
        max_response=cfg.rollout.max_response,
        sampler=sampler,
        window=cfg.context.window,
        stop_at_answer=cfg.rollout.stop_at_answer and not cfg.on_hosts,
        schedule=SharedPrompts() if shares else Schedule(),
    )
    for extension in cfg.extensions if training else ():
        settings = extension.settings(settings, cfg)
    return settings


def build_collect(
    cfg: Config,
    model: Model,
    mesh: Any,
    *,
    training: bool,
    worlds: host.Worlds | None = None,
    change: Callable[[RolloutSettings], RolloutSettings] = lambda settings: settings,
) -> Callable:
    """Return (params, task, episodes, key) -> (rollout, counters) over the mesh.

    On the device it is one jitted program; on hosts, a Python loop around jitted programs. change:
    applied to the rollout settings of the config.
    """
    settings = change(rollout_settings(cfg, model, mesh, training=training))
    player, model = settings.player, settings.model
    rules = sharding.rollout_rules(mesh, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads)

    def prepare_one(params):
        params = lora.merge(params, model.lora_scale)
        # Cast before moving: a small chip cannot hold float32 parameters.
        params = jax.tree.map(lambda x: x.astype(model.dtype), params)
        layout = sharding.specs(params, rules, mesh)
        return jax.lax.with_sharding_constraint(params, layout)

    def prepare(params):
        return player.each(prepare_one, params)

    def prepare_for_hosts(params):  # once for many programs; device.collect transposes by itself
        return player.transpose(prepare(params))

    if worlds is not None:
        return hosts.build_collect(cfg, mesh, worlds, jax.jit(prepare_for_hosts), settings)
    play = device.collect_on_mesh(mesh, settings)
    reward = rewards.load(cfg.reward.function, cfg.reward.components)

    def collect(params, task, episodes, key):
        rollout, counters = play(prepare(params), task, episodes, key)
        if reward is None:
            return rollout, counters
        rollout, faults = rewards.of_rollout(rollout, task, reward)
        layout = sharding.shard_rows(mesh)
        paid = jax.lax.with_sharding_constraint((rollout.rewards, rollout.extra), layout)
        return rollout.replace(rewards=paid[0], extra=paid[1]), counters | faults

    return jax.jit(collect, compiler_options=model.compiler_options)


def context_of(cfg: Config, task: Any) -> windows.Context | windows.ConversationSpec | None:
    """Return the part of a task's episodes that the policy sees; None = everything."""
    if cfg.context.window:
        return windows.Context.of(task, cfg.context.window, cfg.rollout.max_response)
    if cfg.most_branches > 1:
        return windows.ConversationSpec(cfg.most_branches, task.prefix.shape[0], task.env.context)
    return None


def build_optimisers(cfg: Config) -> tuple:
    """Return the optimisers of policy and critic (None without a critic)."""
    optim = cfg.optim
    critic = optim.tx(optim.critic_lr, cfg.critic.updates) if cfg.algorithm.USES_CRITIC else None
    return optim.tx(optim.lr), critic
