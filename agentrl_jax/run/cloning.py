"""Demonstrations of a run, the policy cloned from them, and those that join its batches."""

import functools

import jax
import optax

from agentrl_jax.envs.hosts.world import WorldError
from agentrl_jax.imitation import clone, demonstrations, trajectories
from agentrl_jax.machine import sharding
from agentrl_jax.models import lora
from agentrl_jax.records.progress import Progress
from agentrl_jax.rl import evol
from agentrl_jax.run import parts, usage
from agentrl_jax.run.config import Config
from agentrl_jax.run.params import CLONED, trained_part
from agentrl_jax.run.run import Run
from agentrl_jax.run.streams import BASE, CLONE, Streams
from agentrl_jax.text import agents
from agentrl_jax.text.conversation import Task
from agentrl_jax.types import Demonstrations, Params

# The defaults of optim, but fixed: arms that differ in how they train start from the same clone.
WEIGHT_DECAY, MAX_GRAD_NORM = 0.01, 1.0


def find_demonstrations(run: Run) -> Demonstrations:
    """Those of cfg.clone.file, or our own: oracle and random play of the training levels."""
    found = read_demonstrations(run) if run.config.clone.file else demonstrations_of_all(run)
    lengths, most = demonstrations.answer_lengths(found.mask), run.config.rollout.max_response
    if long := int((lengths > most).sum()):
        usage.warn(
            f'{long} of {len(lengths)} demonstrated answers have up to {lengths.max()} '
            f'tokens, which rollout.max_response={most} cuts: the policy learns what it cannot '
            'finish'
        )
    return found


def demonstrations_of_all(run: Run) -> Demonstrations:
    """Own demonstrations of every world that trains."""
    each = zip(run.config.members, run.training.tasks, strict=True)
    found = [own_demonstrations(run, *one) for one in each if one[0].clone.episodes]
    return found[0] if len(found) == 1 else demonstrations.join(found, run.tokenizer.pad_id)


def own_demonstrations(run: Run, cfg: Config, task: Task) -> Demonstrations:
    """Oracle and random play of the training levels of one world."""
    if cfg.clone.has_limits:
        cfg = cfg.with_clone_limits
        task = parts.build_text_task(cfg, run.tokenizer, 'train', run.mesh)
    chosen = dict(
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
                found, cut = demonstrations.demonstrate_on_hosts(
                    task, conversation, player, report=progress.advance, **chosen
                )
        except WorldError as error:  # of a server, for one, that searches for it
            raise ValueError(f'a world of the demonstrations failed: {error}') from error
        if cut:
            bound = demonstrations.bound_of(task, cfg.rollout.max_tokens)
            usage.warn(
                f'{cut} of {cfg.clone.episodes} demonstrated episodes of {cfg.env.name} '
                f'do not fit into {bound}, and are left out from the first answer on that does not'
            )
        return found

    def expert(states, used):
        return task.env.plans(states, used, cfg.env.max_actions_per_episode, task.env_params)

    with Progress(task.max_turns, 'demonstrating') as progress:
        return demonstrations.demonstrate(
            task,
            run.tokenizer,
            expert,
            thoughts=cfg.clone.thoughts,
            report=progress.advance,
            **chosen,
        )


def read_demonstrations(run: Run) -> Demonstrations:
    """The trajectories of cfg.clone.file that fit into rollout.max_tokens."""
    cfg = run.config
    records = trajectories.read_records(cfg.clone.file)
    found, dropped = trajectories.demonstrations_of(
        records,
        run.tokenizer,
        max_tokens=cfg.rollout.max_tokens,
        vocab_size=run.model.vocab_size,
        openings=(*agents.openings(cfg.agent.build()), cfg.answer_opening),
    )
    if dropped:
        usage.warn(
            f'{dropped} of {len(records)} trajectories of {cfg.clone.file} have more '
            f'than rollout.max_tokens={cfg.rollout.max_tokens} tokens and are left out'
        )
    return found


def optimiser(cfg: Config) -> optax.GradientTransformation:
    """AdamW with clone.lr, which falls linearly to 0, and the betas of optim.

    Weight decay and clipping are WEIGHT_DECAY and MAX_GRAD_NORM, not those of optim.
    """
    rate = optax.linear_schedule(cfg.clone.lr, 0.0, cfg.clone.steps)
    moments = dict(b1=cfg.optim.beta1, b2=cfg.optim.beta2)
    adam = optax.adamw(rate, weight_decay=WEIGHT_DECAY, **moments)
    return optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), adam)


def cloned_policy(run: Run, examples: Demonstrations | None) -> Params:
    """Behaviour-cloned policy parameters; None: of demonstrations made for it.

    With clone.adapters its kernels have what adapters learnt; those of training start anew.
    """
    examples = find_demonstrations(run) if examples is None else examples
    cfg, fns = run.config, parts.build_functions(run.config, run.model, run.mesh)
    trained, frozen = run.params, None
    if cfg.clone.adapters:
        make = functools.partial(trained_part, cfg=cfg, index=CLONED)
        layout = sharding.specs(jax.eval_shape(make, run.params), sharding.TRAIN_RULES, run.mesh)
        trained, frozen = jax.jit(make, out_shardings=layout)(run.params), run.params
    with Progress(cfg.clone.steps, 'cloning') as progress:
        cloned = clone.clone(
            trained,
            examples,
            Streams(cfg.seed).key(CLONE),
            hidden_fn=fns.hidden,
            head_fn=fns.head,
            tx=optimiser(cfg),
            steps=cfg.clone.steps,
            batch_size=cfg.clone.batch,
            chunk_size=cfg.batch.head_chunk,
            microbatch_rows=cfg.clone.microbatch_rows or None,
            row_sharding=sharding.shard_rows(run.mesh),
            widths=cfg.batch.widths,
            report=lambda step, loss: progress.advance(1, loss=loss),
            frozen=frozen,
        )
    if frozen is None:
        return cloned
    layout = jax.tree.map(lambda x: x.sharding, frozen)
    merge = functools.partial(lora.merge, scale=cfg.lora.scale)
    return jax.jit(merge, out_shardings=layout)({**frozen, **cloned})


def draw_base(run: Run, base: Demonstrations | None, step: int) -> Demonstrations | None:
    """Demonstrations that join the episodes of a step, laid out by rows; None if there are none."""
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
