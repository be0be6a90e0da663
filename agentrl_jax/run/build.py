"""Build a Run from a config: check it, and assemble its parts and programs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.machine import sharding
from agentrl_jax.measure import metrics, mutual_information, validation
from agentrl_jax.models import Model
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import Extra, UpdateSettings
from agentrl_jax.rl.score import score
from agentrl_jax.rl.update import learn
from agentrl_jax.rollout import windows
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run import collecting, hooks, hosts, mixture, parts, usage
from agentrl_jax.run.config import Config, check, effective, read
from agentrl_jax.run.hooks import Extension, Moment, Parts, Probe
from agentrl_jax.run.run import EvalPool, Run, TrainPrograms
from agentrl_jax.run.streams import PAIRS, draw_episodes, every_level
from agentrl_jax.text import grammar
from agentrl_jax.text.conversation import HostTask, Task
from agentrl_jax.text.task import TextTask
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params, Rollout, Scores

PRETRAINED_LR = 1e-4  # pretrained weights are trained with lower learning rates
PRETRAINED_SIZE = 10**8  # parameters; larger models start from pretrained weights


def measure_rollout(
    rollout: Rollout, task: Task | None = None, *, cfg: Config
) -> dict[str, jax.Array]:
    """Return the metrics of a rollout. task: its only environment, which adds its own metrics."""
    measured = metrics.rollout_metrics(rollout, cfg.rollout.group_size)
    for extension in cfg.extensions:
        measured |= extension.metrics(rollout)
    names = isinstance(task, TextTask)  # on hosts, actions are texts
    measured |= metrics.agent_metrics(rollout, cfg.agent.build(), names_actions=names)
    return measured if task is None else measured | metrics.environment_metrics(rollout, task)


def scores_of(
    params: Params,
    critic_params: Params | None,
    rollout: Rollout,
    fns: ModelFns,
    *,
    recompute: bool,
    settings: UpdateSettings,
) -> Scores:
    """Return values [B, T] of a rollout's tokens, and recomputed log-probabilities if requested."""
    windows = None if settings.context is None else settings.context.windows(rollout)
    models = params, critic_params, None
    return score(*models, rollout, fns=fns, settings=settings, recompute=recompute, windows=windows)


def rescore(
    params: Params, rollout: Rollout, *, fns: ModelFns, settings: UpdateSettings
) -> jax.Array:
    """Return log-probabilities [B, T] of a rollout's tokens under other parameters."""
    fns = fns.replace(values=None)
    return scores_of(params, None, rollout, fns, recompute=True, settings=settings).old_logprobs


def build_update_settings(
    cfg: Config, mesh: Mesh, task: Any, extras: tuple[Extra, ...] = ()
) -> UpdateSettings:
    """Return the settings of an update. task: determines the prompt width if windows are cut."""
    answers = task.grammar if cfg.rollout.constrain else None
    return UpdateSettings.of(
        cfg,
        context=context_of(cfg, task),
        bits=None if answers is None else answers.bits,
        layout=sharding.shard_rows(mesh),
        extras=extras,
    )


def context_of(cfg: Config, task: Any) -> windows.Context | windows.ConversationSpec | None:
    """Return the part of a task's episodes that the policy sees; None = everything."""
    if cfg.context.window:
        return windows.Context.of(task, cfg.context.window, cfg.rollout.max_response)
    if cfg.most_branches > 1:
        return windows.ConversationSpec(cfg.most_branches, task.prefix.shape[0], task.env.context)
    return None


def build_learn(fns: ModelFns, settings: UpdateSettings) -> Callable:
    """Return jitted learn(state, frozen, rollout, key, lr_scale, base), which donates the state."""
    return jax.jit(functools.partial(learn, fns=fns, settings=settings), donate_argnums=0)


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


def build(given: Any, *, probe: bool = True, learns: bool = True) -> Run:
    """Check a ConfigDict and assemble the parts of its run; usage.WrongUsage if it is invalid.

    probe: create and close an environment of each kind on hosts, so that a failure ends the command
    now. learns: whether the run may be trained.
    """
    with usage.checked():
        config_dict = effective(given)
        cfg = read(config_dict, None)
        mesh = parts.build_mesh(cfg)
        cfg = check(cfg, sharding.row_shards(mesh))
        tokenizer = parts.build_tokenizer(cfg)
        tasks = build_tasks(cfg, tokenizer, mesh)
        held_out = build_held_out(cfg, tokenizer, mesh)
        for task in (*tasks, *held_out.values()):
            parts.check_reward(cfg, task)
        for task in tasks if probe else ():
            if isinstance(task, HostTask):
                hosts.probe(task.env, cfg.hosts.policy.tries)
        model, params = parts.build_model(cfg, tokenizer, mesh)
        if learns:
            warn_of_random_start(cfg, model)
        setup = build_setup(cfg, model, tokenizer, mesh)
        additions = tuple(extension.load(setup, learns=learns) for extension in cfg.extensions)
    worlds = {
        member.env.name: parts.build_worlds(member, tokenizer)
        for member in cfg.members
        if member.on_hosts
    }
    return Run(
        config=cfg,
        config_dict=config_dict,
        mesh=mesh,
        tokenizer=tokenizer,
        model=model,
        params=params,
        additions=additions,
        optimizers=parts.build_optimisers(cfg),
        training=build_training(cfg, mesh, model, additions, tasks, tokenizer, worlds),
        pools=build_validations(cfg, mesh, model, held_out, additions, worlds),
        worlds=worlds,
    )


def build_setup(cfg: Config, model: Model, tokenizer: Tokenizer, mesh: Mesh) -> hooks.Setup:
    """Return what extensions need to load their additions."""

    def load_policy(path):
        config, params = parts.load_policy(path, mesh=mesh)
        return dataclasses.replace(config, **parts.compute_fields(cfg)), params

    return hooks.Setup(
        config=cfg,
        model=model,
        tokenizer=tokenizer,
        mesh=mesh,
        load_policy=load_policy,
        load_tokenizer=lambda path: load_tokenizer(parts.tokenizer_of(path)),
        functions=functools.partial(parts.build_functions, cfg, mesh=mesh, critic=False),
    )


def build_tasks(cfg: Config, tokenizer: Tokenizer, mesh: Mesh) -> tuple[Task, ...]:
    """Return the training environments as text tasks."""
    tasks = [parts.build_text_task(member, tokenizer, 'train', mesh) for member in cfg.members]
    if not cfg.rollout.constrain:
        return tuple(tasks)
    shared = grammar.share_columns([task.grammar for task in tasks])
    tasks = [task.replace(grammar=columns) for task, columns in zip(tasks, shared, strict=True)]
    return tuple(tasks if mesh is None else sharding.replicate(tasks, mesh))


def build_held_out(cfg: Config, tokenizer: Tokenizer, mesh: Mesh) -> dict[tuple[str, str], Task]:
    """Return the validation pools by (split, environment), starting with eval.split."""
    cfg = cfg.held_out
    return {
        (split, member.env.name): parts.build_text_task(member, tokenizer, split, mesh)
        for split in (cfg.eval.split, *cfg.eval.also)
        for member in cfg.members
    }


def build_draw(cfg: Config, task: Task, extensions: tuple[Extension, ...] = ()) -> Callable:
    """Return draw_episodes for an environment, with the changes of extensions."""
    sizes = dict(
        levels=task.env.num_levels(task.env_params),
        groups=cfg.rollout.num_groups,
        group_size=cfg.rollout.group_size,
    )

    def draw(key, step, first=0):
        episodes = draw_episodes(key, step, first, **sizes)
        for extension in extensions:
            episodes = extension.draw(episodes, cfg)
        return episodes

    return draw


def build_rollout_programs(
    cfg: Config, mesh: Mesh, config: Model, tasks: tuple[Task, ...], worlds: dict[str, Worlds]
) -> dict[str, Any]:
    """Return the fields of TrainPrograms that play and measure a rollout."""
    rows, replicated = sharding.shard_rows(mesh), NamedSharding(mesh, PartitionSpec())
    counts = [member.rollout.episodes for member in cfg.members]
    draws = [
        jax.jit(build_draw(member, task, cfg.extensions), out_shardings=rows)
        for member, task in zip(cfg.members, tasks, strict=True)
    ]
    make = functools.partial(parts.build_collect, model=config, mesh=mesh, training=True)
    collects = tuple(make(member, worlds=worlds.get(member.env.name)) for member in cfg.members)
    join = jax.jit(mixture.joined, out_shardings=rows)
    measure = jax.jit(functools.partial(measure_rollout, cfg=cfg), out_shardings=replicated)

    @functools.partial(jax.jit, out_shardings=rows)
    def split(rollout):
        return tuple(map(mixture.own, tasks, mixture.blocks(counts, rollout)))

    return dict(
        draw=functools.partial(mixture.draw, draws=draws, counts=counts),
        collect=functools.partial(mixture.collect, collects=collects, join=join),
        collects=collects,
        metrics=functools.partial(
            mixture.measure_worlds, measure=measure, split=split if cfg.env.mix else None
        ),
    )


def build_training(
    cfg: Config,
    mesh: Mesh,
    config: Model,
    additions: tuple[hooks.Addition, ...],
    tasks: tuple[Task, ...],
    tokenizer: Tokenizer,
    worlds: dict[str, Worlds],
) -> TrainPrograms:
    """Build the programs of a training step."""
    rows, replicated = sharding.shard_rows(mesh), NamedSharding(mesh, PartitionSpec())
    fns = parts.build_functions(cfg, config, mesh)
    extras = hooks.extras_of(additions, tasks[0])
    settings = build_update_settings(cfg, mesh, tasks[0], extras)
    one = cfg.members[0]
    built = Parts(
        config=cfg,
        mesh=mesh,
        model=config,
        fns=fns,
        learning=settings,
        task=tasks[0],
        tokenizer=tokenizer,
        draw=build_draw(one, tasks[0]),
        collect=lambda change: parts.build_collect(
            one, config, mesh, training=True, worlds=worlds.get(one.env.name), change=change
        ),
        score=functools.partial(scores_of, recompute=False, settings=settings),
    )
    probes = [build_information(built)] if cfg.alarm.mi_every else []
    eval_probes = {}
    for extension in cfg.extensions:
        probes += extension.probes(built)
        eval_probes |= extension.eval_probes(built)
    return TrainPrograms(
        tasks=tasks,
        **build_rollout_programs(cfg, mesh, config, tasks, worlds),
        pack=collecting.build_pack(settings, rows, replicated),
        probes=tuple(probes),
        learn=build_learn(fns, settings),
        rescore=jax.jit(functools.partial(rescore, fns=fns, settings=settings), out_shardings=rows),
        eval_probes=eval_probes,
    )


def build_information(parts: Parts) -> Probe:
    """Build the probe of the mutual information between prompts and answers."""
    cfg = parts.config
    replicated = NamedSharding(parts.mesh, PartitionSpec())
    settings = mutual_information.Settings(
        group_size=cfg.rollout.group_size,
        text=cfg.alarm.mi_text,
        microbatch_rows=cfg.batch.microbatch_rows,
        head=dataclasses.replace(parts.learning.head, row_tokens=cfg.rollout.max_response),
    )
    information = functools.partial(
        mutual_information.information, settings=settings, fns=parts.fns, layout=replicated
    )
    program = jax.jit(information, out_shardings=replicated)

    def measure(moment: Moment):
        key = moment.streams.key(PAIRS, moment.step)
        return program(moment.policy, parts.task, moment.rollout, key), []

    return Probe('the mutual information', cfg.alarm.mi_every, measure)


def build_validations(
    cfg: Config,
    mesh: Mesh,
    config: Model,
    held_out: dict[tuple[str, str], Task],
    additions: tuple[hooks.Addition, ...],
    worlds: dict[str, Worlds],
) -> tuple[EvalPool, ...]:
    """Build the programs of all pools: eval.samples episodes on each of env.eval_levels levels.

    Pools on the device share one collect. With several environments, each has its own pools, with
    the prefixes eval_sokoban, eval_test_sokoban.
    """
    rows, shards = sharding.shard_rows(mesh), sharding.row_shards(mesh)
    make = functools.partial(parts.build_collect, cfg, config, mesh, training=False)
    collects = {name: make(worlds=host_worlds) for name, host_worlds in worlds.items()}
    on_device, replicated = make(), NamedSharding(mesh, PartitionSpec())
    levels, samples = cfg.env.eval_levels, cfg.eval.samples

    def build(split, world, task):
        prefix = 'eval' if split == cfg.eval.split else f'eval_{split}'
        pool = task.env.num_levels(task.env_params)
        count = functools.partial(validation.count, levels=levels, samples=samples)
        more = (addition.measure(task, context_of(cfg, task)) for addition in additions)
        return EvalPool(
            split=split,
            prefix=hosts.of_world(cfg, prefix, world),
            task=task,
            episodes=jax.device_put(every_level(levels, pool, shards, samples), rows),
            collect=collects.get(world, on_device),
            count=jax.jit(count, out_shardings=replicated),
            more=tuple(measure for measure in more if measure is not None),
        )

    return tuple(build(split, world, task) for (split, world), task in held_out.items())
