"""What a run measures: metrics of a training step, and validation. Neither changes training."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.machine import processes, sharding
from agentrl_jax.measure import metrics, mutual_information, validation
from agentrl_jax.models import Model
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.rl.score import score
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run import collecting, hooks, hosts, parts
from agentrl_jax.run.config import Config
from agentrl_jax.run.hooks import Moment, Parts, Probe
from agentrl_jax.run.run import EvalPool, Run
from agentrl_jax.run.streams import EVALUATE, PAIRS, Streams, every_level
from agentrl_jax.text.conversation import Task
from agentrl_jax.text.task import TextTask
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params, Rollout, Scores

# ---- metrics of a step ---------------------------------------------------------------------------


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


def probe(
    probes: Sequence[Probe], moment: Moment, first: bool, check: Callable[[str], None]
) -> dict[str, jax.Array]:
    """Return the metrics of the probes that are due.

    first: the process's first step, which compiles all probes. check: as in train.train_step.
    """
    measured = {}
    for each in probes:
        if first or moment.step % each.every == 0:
            check(f'{each.name} of step {moment.step}')
            extra, counters = jax.device_get(each.measure(moment))  # waits: see time/update_s
            collecting.check_counters(counters)
            measured |= {} if moment.step % each.every else extra
    return measured


def build_probes(built: Parts) -> tuple[tuple[Probe, ...], dict[str, Callable]]:
    """Return the measurements during training, and the metrics of a validation by name."""
    probes = [build_information(built)] if built.config.alarm.mi_every else []
    eval_probes = {}
    for extension in built.config.extensions:
        probes += extension.probes(built)
        eval_probes |= extension.eval_probes(built)
    return tuple(probes), eval_probes


def build_information(built: Parts) -> Probe:
    """Build the probe of the mutual information between prompts and answers."""
    cfg = built.config
    replicated = NamedSharding(built.mesh, PartitionSpec())
    settings = mutual_information.Settings(
        group_size=cfg.rollout.group_size,
        text=cfg.alarm.mi_text,
        microbatch_rows=cfg.batch.microbatch_rows,
        head=dataclasses.replace(built.learning.head, row_tokens=cfg.rollout.max_response),
    )
    information = functools.partial(
        mutual_information.information, settings=settings, fns=built.fns, layout=replicated
    )
    program = jax.jit(information, out_shardings=replicated)

    def measure(moment: Moment):
        key = moment.streams.key(PAIRS, moment.step)
        return program(moment.policy, built.task, moment.rollout, key), []

    return Probe('the mutual information', cfg.alarm.mi_every, measure)


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


# ---- validation ----------------------------------------------------------------------------------


def is_due(cfg: Config, step: int) -> bool:
    """Return whether there is a validation before this step."""
    every = cfg.eval.every
    return step in (0, cfg.steps) or bool(every and step % every == 0)


def validate(
    run: Run, policy: Params, step: int = 0, check: Callable[[str], None] = processes.go_on
) -> dict[str, float]:
    """Play every level of the held-out pools with a fixed seed. check: as in train.train_step."""
    measured, counts, split = {}, [], run.config.eval.split
    for pool in run.pools:
        check(f'the validation before step {step}')
        hosts.label(run, step=step, split=split, number=0)
        key = Streams(run.config.seed).key(EVALUATE)
        rollout, counters = pool.collect(policy, pool.task, pool.episodes, key)
        collecting.check_validation(counters, f'step {step}, {split} episodes')
        counts.append(pool.sums(policy, rollout))
        measured |= validation.summarise(counts[-1], pool.prefix)
    for name, measure in run.training.eval_probes.items():
        check(f'{name} before step {step}')
        measured[name] = measure(policy)
    if run.config.env.mix:  # over all environments, which have the same number of episodes
        measured |= validation.summarise(validation.total(counts))
    return measured


def build_held_out(cfg: Config, tokenizer: Tokenizer, mesh: Mesh) -> dict[str, Task]:
    """Return the validation pools by environment."""
    return {
        member.env.name: parts.build_text_task(member, tokenizer, cfg.eval.split, mesh)
        for member in cfg.held_out.members
    }


def build_validations(
    cfg: Config,
    mesh: Mesh,
    config: Model,
    held_out: dict[str, Task],
    additions: tuple[hooks.Addition, ...],
    worlds: dict[str, Worlds],
) -> tuple[EvalPool, ...]:
    """Build the programs of all pools: eval.samples episodes on each of env.eval_levels levels.

    Pools on the device share one collect. With several environments, each has its own pool, with
    the prefix eval_sokoban.
    """
    rows, shards = sharding.shard_rows(mesh), sharding.row_shards(mesh)
    make = functools.partial(parts.build_collect, cfg, config, mesh, training=False)
    collects = {name: make(worlds=host_worlds) for name, host_worlds in worlds.items()}
    on_device, replicated = make(), NamedSharding(mesh, PartitionSpec())
    levels, samples = cfg.env.eval_levels, cfg.eval.samples

    def build(world, task):
        pool = task.env.num_levels(task.env_params)
        count = functools.partial(validation.count, levels=levels, samples=samples)
        more = (addition.measure(task, parts.context_of(cfg, task)) for addition in additions)
        return EvalPool(
            prefix=hosts.of_world(cfg, 'eval', world),
            task=task,
            episodes=jax.device_put(every_level(levels, pool, shards, samples), rows),
            collect=collects.get(world, on_device),
            count=jax.jit(count, out_shardings=replicated),
            more=tuple(measure for measure in more if measure is not None),
        )

    return tuple(itertools.starmap(build, held_out.items()))
