"""Build the parts of a run: mesh, tokenizer, environment, model, rollout, optimisers."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs import HOSTS, simulation
from agentrl_jax.envs.base import build
from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.machine import checkpoint, files, sharding
from agentrl_jax.models import DRAWN, Model, adapters, kernels, lora, weights
from agentrl_jax.models.functions import ModelFns, model_functions
from agentrl_jax.rollout import device, host, rewards, windows
from agentrl_jax.rollout.keepers import Pool
from agentrl_jax.rollout.openings import SharedPrompts
from agentrl_jax.rollout.rows import Player
from agentrl_jax.rollout.sampling import Sampler
from agentrl_jax.rollout.slots import RolloutSettings, Schedule
from agentrl_jax.run import usage
from agentrl_jax.run.config import Config
from agentrl_jax.run.migration import read_saved
from agentrl_jax.run.params import holds_run, saved_policy
from agentrl_jax.settings.callables import import_callable
from agentrl_jax.text import agents, forms, grammar
from agentrl_jax.text import task as text
from agentrl_jax.text.conversation import Conversation, HostTask, Task, build_host_task
from agentrl_jax.text.stops import build_stop_table
from agentrl_jax.text.task import TextTask, build_task
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.tokens.load import check_fits, load_tokenizer
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params, Rollout

TOKENIZERS = Path(__file__).parents[1] / 'tokens'
BUNDLED_TOKENIZER = TOKENIZERS / 'demo.model'
PRETRAINED_LR = 1e-4  # pretrained weights are trained with lower learning rates
PRETRAINED_SIZE = 10**8  # parameters; larger models start from pretrained weights
POLL = 8  # maximum number of tokens sampled between checks for replies of environments on hosts
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
    make = host_task if cfg.on_hosts else device_task
    task = make(cfg, tokenizer, split)
    enough = device.check_budget(
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


def device_task(cfg: Config, tokenizer: Tokenizer, split: str) -> TextTask:
    """Build an environment on the device as text."""
    env, env_params = build_environment(cfg, split)
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


def host_task(cfg: Config, tokenizer: Tokenizer, split: str) -> HostTask:
    """Build environments on hosts as text."""
    env, env_params = build_environment(cfg, split)
    return build_host_task(
        env,
        env_params,
        build_conversation(cfg, tokenizer, env),
        max_turns=cfg.env.max_turns,
        forms=cfg.answer_forms(env),
        spelling=cfg.rollout.constrain,
        max_response=cfg.rollout.max_response,
    )


def answer_pattern(cfg: Config) -> str:
    """Return a regular expression of the answers that may be sampled, in any environment of the
    run; '' = any text."""
    if not cfg.rollout.constrain:
        return ''
    patterns = {}
    for world in cfg.worlds:
        if world.name in HOSTS:
            prefix = cfg.hosts.answer_prefix
            rests = [form.removeprefix(prefix) for form in cfg.answer_forms(world)]
            patterns[forms.pattern(rests)] = None
        else:
            limit, opening = cfg.env.max_actions_per_turn, cfg.of_world(world).answer_opening
            names = world.ACTION_NAMES
            patterns[grammar.pattern(names, max_actions=limit, opening=opening)] = None
    return '|'.join(patterns)


def build_conversation(cfg: Config, tokenizer: Tokenizer, env: HostEnvironment) -> Conversation:
    """Build the converter between texts of environments on hosts and token ids."""
    return Conversation(
        build_chat(tokenizer),
        cfg.answer_opening,
        cfg.hosts.max_observation,
        preamble=env.instruction,
        agent=cfg.agent.build(),
    )


def build_worlds(cfg: Config, tokenizer: Tokenizer) -> host.Worlds:
    """Build the pool of environments on hosts, which are created when needed."""
    (env,) = cfg.worlds
    conversation = build_conversation(cfg, tokenizer, env)
    return host.Worlds(Pool(env.make, conversation.prompt), conversation)


def build_mesh(cfg: Config, devices: Any = None) -> jax.sharding.Mesh:
    """Build the mesh of cfg.mesh; data = -1 uses all devices that fsdp and tensor leave."""
    count = jax.device_count() if devices is None else len(devices)
    data, rest = cfg.mesh.data, cfg.mesh.fsdp * cfg.mesh.tensor
    if data == -1 and rest > 0:
        data = max(count // rest, 1)
    return sharding.make_mesh(data, cfg.mesh.fsdp, cfg.mesh.tensor, devices)


def tokenizer_source(cfg: Config) -> Path:
    """Return the tokenizer's path: model.tokenizer, the model's folder, or this package's file.

    If model.path is a run, it is that run's tokenizer.
    """
    if cfg.model.path and not cfg.model.tokenizer:
        return tokenizer_of(files.local_path(cfg.model.path))
    return files.local_path(cfg.model.tokenizer or bundled_tokenizer(*cfg.env.worlds))


def tokenizer_of(path: Path) -> Path:
    """Return the tokenizer's path of a checkpoint: in it, in its base, or in its run's model."""
    if holds_run(path):
        return tokenizer_source(config_of_run(path))
    has_tokenizer = any((path / name).exists() for name in ('tokenizer.json', 'tokenizer.model'))
    return adapters.base_of(path) if adapters.is_adapter(path) and not has_tokenizer else path


def checkpoint_source(cfg: Config) -> Path | None:
    """Return the original checkpoint of a policy, following runs; None for random weights."""
    path = files.local_path(cfg.model.path) if cfg.model.path else None
    if path is not None and holds_run(path):
        return checkpoint_source(config_of_run(path))
    return path


def bundled_tokenizer(*worlds: str) -> Path:
    """Return the small tokenizer of the environments' vocabulary, or the demo's."""
    candidates = [TOKENIZERS / f'{world}.model' for world in worlds]
    paths = {path if path.exists() else BUNDLED_TOKENIZER for path in candidates}
    if len(paths) > 1:
        raise ValueError(
            f'env.mix: {", ".join(worlds)} have different small tokenizers '
            f'({", ".join(sorted(path.name for path in paths))}): set model.tokenizer to one that '
            'has the words of all of them'
        )
    return paths.pop()


def build_tokenizer(cfg: Config) -> Any:
    return load_tokenizer(tokenizer_source(cfg))


def compute_fields(cfg: Config) -> dict[str, Any]:
    """Return the fields of Model that configure how it computes, independent of its sizes."""
    names = ('dtype', 'remat', 'scan_layers')
    return {name: getattr(cfg.model, name) for name in names} | {'lora_scale': cfg.lora.scale}


def random_model_config(cfg: Config, tokenizer: Tokenizer) -> Model:
    """Return the Model of randomly initialised weights."""
    sizes = {name: getattr(cfg.model, name) for name in usage.SIZES}
    return DRAWN(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        head_dim=cfg.model.hidden_size // cfg.model.num_heads,
        **sizes,
        **compute_fields(cfg),
    )


def build_model(cfg: Config, tokenizer: Tokenizer, mesh: Any) -> tuple[Model, Any]:
    """Load or randomly initialise a model: (sizes, float32 parameters laid out for training)."""
    if cfg.model.path:
        config, params = load_policy(files.local_path(cfg.model.path), mesh=mesh)
        check_fits(tokenizer, config.vocab_size)
        return dataclasses.replace(config, **compute_fields(cfg)), params
    config = random_model_config(cfg, tokenizer)
    key = jax.random.fold_in(jax.random.key(cfg.seed), 1)
    return config, sharding.init_sharded(config.init, key, sharding.TRAIN_RULES, mesh)


def warn_of_random_start(cfg: Config, model: Model) -> None:
    """Warn about each setting that only makes sense with pretrained weights."""
    if cfg.model.path or cfg.clone.demonstrates or jax.process_index():
        return
    advice = 'set model.path or clone demonstrations (clone.episodes)'
    if cfg.optim.lr < PRETRAINED_LR or model.param_count() > PRETRAINED_SIZE:
        usage.warn(
            f'model.path is empty: {model.param_count() / 1e6:.3g} M random weights are trained '
            f'with settings for pretrained weights (optim.lr={cfg.optim.lr:g}); {advice}'
        )
    if cfg.algorithm.kl.coef:
        usage.warn(
            f'loss.kl_coef={cfg.algorithm.kl.coef:g} keeps the policy close to random weights: set '
            f'loss.kl_coef=0, or {advice}'
        )


def load_policy(path: Path, *, mesh: Any) -> tuple[Model, Params]:
    """Load a checkpoint or a run's policy: (sizes, float32 parameters laid out for training)."""
    load = load_run if holds_run(path) else weights.load_model
    return load(path, mesh=mesh)


def config_of_run(path: Path) -> Config:
    """Return the config of the newest checkpoint in a workdir, or in its folder `best`."""
    return read_saved(checkpoint.read_extra(path))


def load_run(path: Path, *, mesh: Any, step: int | None = None) -> tuple[Model, Any]:
    """Load (sizes, float32 parameters) of a run's policy, with adapters merged.

    step: the checkpoint; None = the newest.
    """
    cfg = config_of_run(path)
    tokenizer = build_tokenizer(cfg)
    if cfg.model.path:
        config, start = build_model(cfg, tokenizer, mesh)
    else:
        config = random_model_config(cfg, tokenizer)
        start = config.abstract_params()
        start = sharding.with_layout(start, sharding.specs(start, sharding.TRAIN_RULES, mesh))
    policy = saved_policy(cfg, config, mesh, start, path, step=step)
    merged = jax.jit(functools.partial(lora.merge, scale=cfg.lora.scale))(policy)
    return config, merged if cfg.lora.rank else policy


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


REWARD = 'reward.function'


def build_reward(cfg: Config) -> Callable | None:
    """Import reward.function; None if the environment's rewards are used."""
    if not cfg.reward.function:
        return None
    try:
        return import_callable(cfg.reward.function, REWARD)
    except ValueError as error:
        raise ValueError(
            f"{error}; or set --config.reward.function='' to use the environment's rewards"
        ) from error


def check_reward(cfg: Config, task: Task) -> None:
    """Raise a ValueError if reward.function does not fit this environment; compiles nothing."""
    function, name = build_reward(cfg), f'{REWARD}={cfg.reward.function!r}'
    if function is None:
        return
    if isinstance(task, HostTask):
        try:
            inspect.signature(function).bind(None)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'{name} must be, for environments on hosts, {rewards.OF_EPISODE}: {error}'
            ) from error
        return
    shapes = jax.eval_shape(
        functools.partial(
            Rollout.empty,
            pad_id=task.pad_id,
            max_tokens=cfg.rollout.max_tokens,
            max_turns=task.max_turns,
            max_actions=task.max_actions_per_turn,
            words=text.words(task),
        ),
        jax.ShapeDtypeStruct((cfg.rollout.episodes,), np.int32),
        task.prefix,
    )
    rewards.check_traced(function, shapes, task, name=name)


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
        return build_host_collect(cfg, mesh, worlds, jax.jit(prepare_for_hosts), settings)
    play, reward = device.collect_on_mesh(mesh, settings), build_reward(cfg)

    def collect(params, task, episodes, key):
        rollout, counters = play(prepare(params), task, episodes, key)
        if reward is None:
            return rollout, counters
        rollout, faults = rewards.of_rollout(rollout, task, reward)
        layout = sharding.shard_rows(mesh)
        paid = jax.lax.with_sharding_constraint(rollout.rewards, layout)
        return rollout.replace(rewards=paid), counters | faults

    return jax.jit(collect)


def build_host_collect(
    cfg: Config, mesh: Any, worlds: host.Worlds, prepare: Callable, settings: RolloutSettings
) -> host.HostCollect:
    """Build `collect` against environments on hosts."""
    hosts, reward = cfg.hosts, build_reward(cfg)
    tokenizer = worlds.conversation.chat.tokenizer
    stop = (*hosts.stop, *agents.closings(worlds.conversation.agent))
    return host.HostCollect(
        mesh,
        sharding.local_mesh(mesh),
        worlds,
        settings=settings,
        strings=build_stop_table(tokenizer.token_bytes(), stop),
        read_tokens=hosts.read_tokens,
        poll=POLL,
        policy=hosts.policy,
        prepare=prepare,
        reward=None if reward is None else (f'{REWARD}={cfg.reward.function!r}', reward),
    )


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
