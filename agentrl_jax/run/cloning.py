"""Demonstrations of a run: behaviour cloning, and rows that are added to its batches."""

import dataclasses
import functools
from pathlib import Path

import jax
import optax

from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.imitation import clone, demonstrations, trajectories
from agentrl_jax.machine import sharding
from agentrl_jax.models import lora
from agentrl_jax.records.progress import Progress
from agentrl_jax.rl import evol
from agentrl_jax.rl.microbatches import Slices
from agentrl_jax.run import parts, scouting, usage
from agentrl_jax.run.config import Config
from agentrl_jax.run.params import CLONED, trainable_params
from agentrl_jax.run.run import Run
from agentrl_jax.run.streams import BASE, CLONE, Streams
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Task
from agentrl_jax.types import Demonstrations, Params

# Equal to optim's defaults, but fixed: runs with different optimisers start from the same clone.
WEIGHT_DECAY, MAX_GRAD_NORM = 0.01, 1.0


def find_demonstrations(run: Run, workdir: Path | None = None) -> Demonstrations:
    """Return the demonstrations in clone.file, or expert and random play of the training levels.

    workdir: where scouts are kept; needed with clone.expert=scout.
    """
    file = run.config.clone.file
    examples = read_demonstrations(run) if file else demonstrations_of_all(run, workdir)
    lengths, limit = demonstrations.answer_lengths(examples.mask), run.config.rollout.max_response
    if long := int((lengths > limit).sum()):
        usage.warn(
            f'{long} of {len(lengths)} demonstrated answers have up to {lengths.max()} tokens, '
            f'but rollout.max_response={limit} cuts longer ones: the policy learns answers that it '
            'cannot finish'
        )
    return examples


def demonstrations_of_all(run: Run, workdir: Path | None = None) -> Demonstrations:
    """Return expert and random play of every training environment."""
    each = zip(run.config.members, run.training.tasks, strict=True)
    parts = [demonstrate_levels(run, *one, workdir) for one in each if one[0].clone.episodes]
    return parts[0] if len(parts) == 1 else demonstrations.join(parts, run.tokenizer.pad_id)


def with_limits(cfg: Config) -> Config:
    """Return the same run with the limits of expert demonstrations instead of its own."""
    parts = {}
    for name, section in clone.LIMITS.items():
        part = parts.get(section, getattr(cfg, section))
        limit = getattr(cfg.clone, name) or getattr(part, name)
        parts[section] = dataclasses.replace(part, **{name: limit})
    return dataclasses.replace(cfg, **parts)


def demonstrate_levels(
    run: Run, cfg: Config, task: Task, workdir: Path | None = None
) -> Demonstrations:
    """Return expert and random play of one environment's training levels."""
    if cfg.clone.has_limits:
        cfg = with_limits(cfg)
        task = parts.build_text_task(cfg, run.tokenizer, 'train', run.mesh)
    settings = dict(
        seed=cfg.seed,
        episodes=cfg.clone.episodes,
        oracle=cfg.clone.oracle,
        max_tokens=cfg.rollout.max_tokens,
        window=cfg.context.window if cfg.context.window < task.max_turns else 0,
    )
    if cfg.on_hosts:
        player, conversation = task.env.player(), run.worlds[cfg.env.name].conversation
        try:
            with Progress(cfg.clone.episodes, 'demonstrating') as progress:
                examples, cut = demonstrations.demonstrate_on_hosts(
                    task, conversation, player, report=progress.advance, **settings
                )
        except WorldError as error:  # for example from a search server
            raise ValueError(
                f'clone.episodes: an environment failed during a demonstration: {error}'
            ) from error
        if cut:
            bound = demonstrations.budget_name(task, cfg.rollout.max_tokens)
            usage.warn(
                f'{cut} of {cfg.clone.episodes} demonstrated episodes of {cfg.env.name} '
                f'do not fit into {bound}; they are cut before the first answer that does not fit'
            )
        return examples

    def expert(states, used):
        return task.env.plans(states, used, cfg.env.max_actions_per_episode, task.env_params)

    if cfg.clone.expert == 'scout':
        expert = scouting.expert_of(cfg, workdir)
    with Progress(task.max_turns, 'demonstrating') as progress:
        return demonstrations.demonstrate(
            task,
            run.tokenizer,
            expert,
            thoughts=cfg.clone.thoughts,
            report=progress.advance,
            **settings,
        )


def read_demonstrations(run: Run) -> Demonstrations:
    """Return the trajectories of clone.file that fit into rollout.max_tokens."""
    cfg = run.config
    records = trajectories.read_records(cfg.clone.file)
    examples, dropped = trajectories.demonstrations_of(
        records,
        run.tokenizer,
        max_tokens=cfg.rollout.max_tokens,
        vocab_size=run.model.vocab_size,
        openings=(*agents.openings(cfg.agent.build()), cfg.answer_opening),
    )
    if dropped:
        usage.warn(
            f'{dropped} of {len(records)} trajectories in {cfg.clone.file} have more than '
            f'rollout.max_tokens={cfg.rollout.max_tokens} tokens and are skipped'
        )
    return examples


def optimiser(cfg: Config) -> optax.GradientTransformation:
    """Return AdamW with optim's betas and a learning rate that falls linearly from clone.lr to 0.

    Weight decay and clipping are WEIGHT_DECAY and MAX_GRAD_NORM instead of optim's values.
    """
    rate = optax.linear_schedule(cfg.clone.lr, 0.0, cfg.clone.steps)
    moments = dict(b1=cfg.optim.beta1, b2=cfg.optim.beta2)
    adam = optax.adamw(rate, weight_decay=WEIGHT_DECAY, **moments)
    return optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), adam)


def cloned_policy(run: Run, examples: Demonstrations | None, workdir: Path | None = None) -> Params:
    """Return behaviour-cloned policy parameters.

    examples: None to make demonstrations for it. workdir: as in find_demonstrations. With
    clone.adapters, the trained adapters are merged; training starts with new ones.
    """
    examples = find_demonstrations(run, workdir) if examples is None else examples
    cfg, fns = run.config, parts.build_functions(run.config, run.model, run.mesh)
    trained, frozen = run.params, None
    if cfg.clone.adapters:
        make = functools.partial(trainable_params, cfg=cfg, index=CLONED)
        layout = sharding.specs(jax.eval_shape(make, run.params), sharding.TRAIN_RULES, run.mesh)
        trained, frozen = jax.jit(make, out_shardings=layout)(run.params), run.params
    with Progress(cfg.clone.steps, 'cloning') as progress:
        cloned = clone.clone(
            trained,
            examples,
            Streams(cfg.seed).key(CLONE),
            fns=fns,
            tx=optimiser(cfg),
            steps=cfg.clone.steps,
            batch_size=cfg.clone.batch,
            chunk_size=cfg.batch.head_chunk,
            report=lambda step, loss: progress.advance(1, loss=loss),
            slices=Slices(
                cfg.clone.batch // (cfg.clone.microbatch_rows or cfg.clone.batch),
                sharding.shard_rows(run.mesh),
                cfg.batch.widths,
            ),
            frozen=frozen,
        )
    if frozen is None:
        return cloned
    layout = jax.tree.map(lambda x: x.sharding, frozen)
    merge = functools.partial(lora.merge, scale=cfg.lora.scale)
    return jax.jit(merge, out_shardings=layout)({**frozen, **cloned})


def draw_base(run: Run, base: Demonstrations | None, step: int) -> Demonstrations | None:
    """Draw the demonstrations that are added to a step's episodes, sharded by row; None if none."""
    if base is None:
        return None
    cfg = run.config
    drawn = evol.draw(
        base,
        Streams(cfg.seed).key(BASE, step),
        rows=cfg.base_rows,
        max_tokens=cfg.rollout.max_tokens,
        pad_id=run.tokenizer.pad_id,
    )
    return jax.device_put(drawn, sharding.shard_rows(run.mesh))
