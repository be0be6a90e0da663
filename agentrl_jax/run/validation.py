"""Validation: the policy plays every level of the held-out pools."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.machine import processes, sharding
from agentrl_jax.measure import validation
from agentrl_jax.models import Model
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run import collecting, hooks, hosts, parts
from agentrl_jax.run.config import Config
from agentrl_jax.run.run import EvalPool, Run
from agentrl_jax.run.streams import EVALUATE, Streams, every_level
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params


def is_due(cfg: Config, step: int) -> bool:
    """Return whether there is a validation before this step."""
    every = cfg.eval.every
    return step in (0, cfg.steps) or bool(every and step % every == 0)


def validate(
    run: Run,
    policy: Params,
    step: int = 0,
    check: Callable[[str], None] = processes.go_on,
) -> dict[str, float]:
    """Play every level of the held-out pools with a fixed seed. check: as in train.train_step."""
    metrics, counts = {}, []
    for pool in run.pools:
        check(f'the validation before step {step}')
        hosts.label(run, step=step, split=pool.split, number=0)
        key = Streams(run.config.seed).key(EVALUATE)
        rollout, counters = pool.collect(policy, pool.task, pool.episodes, key)
        collecting.check_validation(counters, f'step {step}, {pool.split} episodes')
        counts.append(pool.sums(policy, rollout))
        metrics |= validation.summarise(counts[-1], pool.prefix)
    for name, measure in run.training.eval_probes.items():
        check(f'{name} before step {step}')
        metrics[name] = measure(policy)
    if run.config.env.mix:  # over all environments, which have the same number of episodes
        together = validation.total(counts[: len(run.config.env.worlds)])
        metrics |= validation.summarise(together)
    return metrics


def build_held_out(cfg: Config, tokenizer: Tokenizer, mesh: Mesh) -> dict[tuple[str, str], Task]:
    """Return the validation pools by (split, environment), starting with eval.split."""
    cfg = cfg.held_out
    return {
        (split, member.env.name): parts.build_text_task(member, tokenizer, split, mesh)
        for split in (cfg.eval.split, *cfg.eval.also)
        for member in cfg.members
    }


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
        more = (addition.measure(task, parts.context_of(cfg, task)) for addition in additions)
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
