"""Build a Run from a config: check it, and assemble its parts and programs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.machine import sharding
from agentrl_jax.models import Model
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import Extra, UpdateSettings
from agentrl_jax.rl.update import learn
from agentrl_jax.rollout import rewards
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run import hooks, hosts, loading, measuring, mixture, parts, refilling, usage
from agentrl_jax.run.config import Config, check, effective, read
from agentrl_jax.run.hooks import Extension, Parts
from agentrl_jax.run.run import Run, TrainPrograms
from agentrl_jax.run.streams import draw_episodes
from agentrl_jax.text import grammar
from agentrl_jax.text.conversation import HostTask, Task
from agentrl_jax.tokens.tokenizer import Tokenizer


def build_update_settings(
    cfg: Config, mesh: Mesh, task: Any, extras: tuple[Extra, ...] = ()
) -> UpdateSettings:
    """Return the settings of an update. task: determines the prompt width if windows are cut."""
    answers = task.grammar if cfg.rollout.constrain else None
    return UpdateSettings.of(
        cfg,
        context=parts.context_of(cfg, task),
        bits=None if answers is None else answers.bits,
        layout=sharding.shard_rows(mesh),
        extras=extras,
    )


def build_learn(model: Model, fns: ModelFns, settings: UpdateSettings) -> Callable:
    """Return jitted learn(state, frozen, rollout, key, base), which donates the state."""
    update = functools.partial(learn, fns=fns, settings=settings)
    return jax.jit(update, donate_argnums=0, compiler_options=model.compiler_options)


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
        tokenizer = loading.build_tokenizer(cfg)
        tasks = build_tasks(cfg, tokenizer, mesh)
        held_out = measuring.build_held_out(cfg, tokenizer, mesh)
        sizes = dict(max_tokens=cfg.rollout.max_tokens, episodes=cfg.rollout.episodes)
        reward = rewards.load(cfg.reward.function, cfg.reward.components)
        for task in (*tasks, *held_out.values()):
            rewards.check(reward, task, **sizes)
        for task in tasks if probe else ():
            if isinstance(task, HostTask):
                hosts.probe(task.env, cfg.hosts.policy.tries)
        model, params = loading.build_model(cfg, tokenizer, mesh)
        if learns:
            loading.warn_of_random_start(cfg, model)
        setup = loading.build_setup(cfg, model, tokenizer, mesh)
        additions = tuple(extension.load(setup, learns=learns) for extension in cfg.extensions)
    worlds = {
        member.env.name: hosts.build_worlds(member, tokenizer)
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
        pools=measuring.build_validations(cfg, mesh, model, held_out, additions, worlds),
        worlds=worlds,
    )


def build_tasks(cfg: Config, tokenizer: Tokenizer, mesh: Mesh) -> tuple[Task, ...]:
    """Return the training environments as text tasks."""
    tasks = [parts.build_text_task(member, tokenizer, 'train', mesh) for member in cfg.members]
    if not cfg.rollout.constrain:
        return tuple(tasks)
    shared = grammar.share_columns([task.grammar for task in tasks])
    tasks = [task.replace(grammar=columns) for task, columns in zip(tasks, shared, strict=True)]
    return tuple(tasks if mesh is None else sharding.replicate(tasks, mesh))


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
    measure = jax.jit(
        functools.partial(measuring.measure_rollout, cfg=cfg), out_shardings=replicated
    )

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
        score=functools.partial(measuring.scores_of, recompute=False, settings=settings),
    )
    probes, eval_probes = measuring.build_probes(built)
    rescore = functools.partial(measuring.rescore, fns=fns, settings=settings)
    return TrainPrograms(
        tasks=tasks,
        **build_rollout_programs(cfg, mesh, config, tasks, worlds),
        pack=refilling.build_pack(settings, rows, replicated),
        probes=probes,
        learn=build_learn(config, fns, settings),
        rescore=jax.jit(rescore, out_shardings=rows, compiler_options=config.compiler_options),
        eval_probes=eval_probes,
    )
