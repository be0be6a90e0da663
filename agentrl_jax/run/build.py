"""From a config to a Run: its parts and its programs, checked; nothing is trained yet."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.machine import sharding
from agentrl_jax.measure import critic_error, metrics, mutual_information, validation
from agentrl_jax.models.functions import ModelFns, on_base
from agentrl_jax.models.qwen2 import ModelConfig
from agentrl_jax.rl import batches, score
from agentrl_jax.rollout.episodes import Episodes, draw_episodes, every_level
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run import check, collecting, parts, settings
from agentrl_jax.run.effective import effective
from agentrl_jax.run.params import Frozen, player_of
from agentrl_jax.text.conversation import HostTask
from agentrl_jax.text.task import TextTask
from agentrl_jax.types import Demonstrations, Params, Rollout, Scores, TrainState


@dataclasses.dataclass(frozen=True)
class Training:
    """The training environment as text, and the programs of a step (all jitted)."""

    task: TextTask | HostTask
    draw: Callable  # (key, step, first stream) -> episodes
    collect: Callable  # (params, task, episodes, key) -> (rollout, counters)
    pack: Callable | None  # collecting.pack; None without dynamic sampling
    metrics: Callable  # (rollout, task) -> metrics
    information: Callable  # (policy, task, rollout, key) -> collapse/ metrics
    learn: Callable  # (state, frozen, rollout, key, lr_scale, base) -> (state, metrics, ...)
    rescore: Callable  # (policy, rollout) -> log-probabilities [B, T]
    critic_error: Callable | None  # (state, frozen, task, levels, step, key) -> (metrics, counters)


@dataclasses.dataclass(frozen=True)
class Validation:
    """A pool of levels as text, its episodes, and the programs that play and count them."""

    prefix: str  # of its metrics
    task: TextTask | HostTask
    episodes: Episodes
    collect: Callable  # (params, task, episodes, key) -> (rollout, counters)
    count: Callable  # (rollout, task) -> sums over its first eval_levels rows


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, none of which changes."""

    cfg: Any
    mesh: Mesh
    tokenizer: Any
    config: ModelConfig
    params: Params  # as loaded or drawn, before cloning; shapes alone once a state has them
    txs: tuple  # optimisers of policy and critic
    training: Training
    validation: Validation  # of eval.split
    also: tuple[Validation, ...]  # of eval.also and eval.worlds
    worlds: Worlds | None = None  # on hosts; None: on the device


def learn(
    state: TrainState,
    frozen: Frozen,
    rollout: Rollout,
    key: jax.Array | None = None,
    lr_scale: float | jax.Array = 1.0,
    base: Demonstrations | None = None,
    *,
    fns: ModelFns,
    learning: batches.Learning,
) -> tuple:
    """One update from one rollout: keep groups, score, make the batch, optimise.

    Returns (state, metrics, rows int32 [b] of the update, their advantages float32 [b, T], nan for
    rows that did not train). A key shuffles; base: demonstrations that join the batch.
    """
    fns = on_base(fns, frozen.model)
    samples, rows, advantages, selected = batches.prepare(
        state, frozen.reference, rollout, base, fns=fns, learning=learning
    )
    state, measured = learning.update(
        state,
        samples,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=fns.values,
        value_head_fn=fns.value_head,
        key=key,
        lr_scale=lr_scale,
    )
    return state, measured | selected, rows, advantages


def measure_rollout(rollout: Rollout, task: TextTask, *, group_size: int) -> dict[str, jax.Array]:
    """Metrics of a rollout, the environment's own included."""
    common = metrics.rollout_metrics(rollout, group_size)
    return (
        common
        | metrics.agent_metrics(rollout, task.agent)
        | metrics.environment_metrics(rollout, task)
    )


def scores_of(
    params: Params,
    critic_params: Params | None,
    rollout: Rollout,
    *,
    values_fn: Callable | None,
    recompute: bool,
    fns: ModelFns,
    cfg: Any,
    task: TextTask,
) -> Scores:
    """Log-probabilities, if computed again, and values [B, T] of the tokens of a rollout."""
    windows = settings.build_windows(cfg, task)
    return score.score(
        params,
        critic_params,
        None,
        rollout,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=values_fn,
        windows=None if windows is None else windows(rollout),
        microbatch_rows=cfg.batch.microbatch_rows,
        temperature=cfg.rollout.temperature,
        chunk_size=cfg.batch.head_chunk,
        recompute=recompute,
    )


def rescore(params: Params, rollout: Rollout, **of: Any) -> jax.Array:
    """Log-probabilities [B, T] of a rollout's tokens under other parameters."""
    return scores_of(params, None, rollout, values_fn=None, recompute=True, **of).old_logprobs


def measure_critic(
    state: TrainState,
    frozen: Frozen,
    task: TextTask,
    levels: jax.Array,
    step: jax.Array | int,
    key: jax.Array,
    *,
    draw: Callable,
    collect: Callable,
    fns: ModelFns,
    cfg: Any,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The critic's error on the episodes of a step, which are played with continuations.

    levels, key: those of the step's rollout. Nothing that trains sees these episodes.
    """
    rollout, counters = collect(player_of(state, frozen.model), task, draw(levels, step), key)
    fns = on_base(fns, frozen.model)
    values = scores_of(
        state.params,
        state.critic_params,
        rollout,
        values_fn=fns.values,
        recompute=False,
        fns=fns,
        cfg=cfg,
        task=task,
    ).values
    whole = cfg.loss.reward_on == 'episode'
    return critic_error.critic_error(values, rollout, whole=whole), counters


def build_learn(
    cfg: Any, mesh: Mesh, config: ModelConfig, task: TextTask, tokenizer: Any, txs: tuple
) -> Callable:
    """Jitted learn(state, frozen, rollout, key, lr_scale, base); the state is donated."""
    learner = functools.partial(
        learn,
        fns=parts.build_functions(cfg, config, mesh),
        learning=settings.build_learning(cfg, mesh, task, tokenizer, txs),
    )
    return jax.jit(learner, donate_argnums=0)


def build(cfg: Any) -> Run:
    """Checks the config and assembles its parts; cfg of the run is the effective config."""
    cfg = effective(cfg)
    mesh = parts.build_mesh(cfg)
    check.check(cfg, sharding.row_shards(mesh))
    tokenizer = parts.build_tokenizer(cfg)
    task = parts.build_text_task(cfg, tokenizer, 'train', mesh)
    held_out, *also = build_held_out(cfg, tokenizer, mesh).items()
    config, params = parts.build_model(cfg, tokenizer, mesh)
    txs = parts.build_optimisers(cfg)
    worlds = parts.build_worlds(cfg, tokenizer)
    collect = parts.build_collect(cfg, config, mesh, training=False, worlds=worlds)
    return Run(
        cfg=cfg,
        mesh=mesh,
        tokenizer=tokenizer,
        config=config,
        params=params,
        txs=txs,
        training=build_training(cfg, mesh, config, task, tokenizer, txs, worlds),
        validation=build_validation(cfg, mesh, *held_out, collect),
        also=tuple(build_validation(cfg, mesh, *pool, collect) for pool in also),
        worlds=worlds,
    )


def build_held_out(cfg: Any, tokenizer: Any, mesh: Mesh) -> dict[str, TextTask]:
    """The pools that are validated on, by the prefix of their metrics; that of eval.split first."""
    own, *others = (cfg.eval.split, *cfg.eval.also)
    pools = {'eval': parts.build_text_task(cfg, tokenizer, own, mesh)}
    for split in others:
        pools[f'eval_{split}'] = parts.build_text_task(cfg, tokenizer, split, mesh)
    for world in cfg.eval.worlds:
        other = cfg.copy_and_resolve_references()
        with other.unlocked():
            other.env.name = world
        try:
            pools[f'eval_{world}'] = parts.build_text_task(other, tokenizer, own, mesh)
        except ValueError as error:
            raise ValueError(f'eval.worlds, {world}: {error}') from error
    return pools


def build_training(
    cfg: Any,
    mesh: Mesh,
    config: ModelConfig,
    task: TextTask | HostTask,
    tokenizer: Any,
    txs: tuple,
    worlds: Worlds | None = None,
) -> Training:
    """The programs of a step."""
    rows, whole = sharding.shard_rows(mesh), NamedSharding(mesh, PartitionSpec())
    fns, group_size = parts.build_functions(cfg, config, mesh), cfg.rollout.group_size
    draw = functools.partial(
        draw_episodes,
        levels=task.env.num_levels(task.env_params),
        groups=cfg.rollout.num_groups,
        group_size=group_size,
        common=cfg.rollout.common_random_numbers,
        forks=parts.build_forks(cfg),
    )
    information = functools.partial(
        mutual_information.information,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        layout=whole,
        **settings.information_settings(cfg),
    )
    measure = functools.partial(measure_rollout, group_size=group_size)
    collect = parts.build_collect(cfg, config, mesh, training=True, worlds=worlds)
    labels = functools.partial(draw, forks=parts.build_label_forks(cfg))
    measured = functools.partial(measure_critic, draw=labels, collect=collect, fns=fns, cfg=cfg)
    return Training(
        task=task,
        draw=jax.jit(draw, out_shardings=rows),
        collect=collect,
        pack=collecting.build_pack(cfg, settings.build_keep(cfg), rows, whole),
        metrics=jax.jit(measure, out_shardings=whole),
        information=jax.jit(information, out_shardings=whole),
        learn=build_learn(cfg, mesh, config, task, tokenizer, txs),
        rescore=jax.jit(
            functools.partial(rescore, fns=fns, cfg=cfg, task=task), out_shardings=rows
        ),
        critic_error=jax.jit(measured, out_shardings=whole) if cfg.fork.value_every else None,
    )


def build_validation(
    cfg: Any, mesh: Mesh, prefix: str, task: TextTask, collect: Callable
) -> Validation:
    """The programs of validation: eval.samples episodes on each of env.eval_levels levels."""
    levels = task.env.num_levels(task.env_params)
    played, samples = cfg.env.eval_levels, cfg.eval.samples
    episodes = every_level(played, levels, sharding.row_shards(mesh), samples)
    count = functools.partial(validation.count, levels=played, samples=samples)
    return Validation(
        prefix=prefix,
        task=task,
        episodes=jax.device_put(episodes, sharding.shard_rows(mesh)),
        collect=collect,
        count=jax.jit(count, out_shardings=NamedSharding(mesh, PartitionSpec())),
    )
