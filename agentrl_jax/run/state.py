"""Where a run starts: random or given weights, perhaps cloned, or the newest checkpoint.

With LoRA these weights are the frozen base of policy, critic and reference alike. They come from
model.path again when a run resumes; weights that were drawn or cloned are kept in workdir/base.
"""

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from agentrl_jax.envs import experts
from agentrl_jax.imitation import clone as sft
from agentrl_jax.imitation import kept as clones
from agentrl_jax.imitation import trajectories
from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.models import critic, lora
from agentrl_jax.records.progress import Progress
from agentrl_jax.rl import evol
from agentrl_jax.run import check, parts
from agentrl_jax.types import Params, TrainState

LEVELS, COLLECT, EVALUATE, CLONE, SHUFFLE, REFILL, PAIRS, BASE, ADAPTERS = range(9)  # streams
AFTER_ROLL_BACK = 1 << 20  # streams of training after a roll back lie from here on
# What a resumed run may change
MAY_DIFFER = ('steps', 'log', 'checkpoint', 'mesh', 'alarm', 'clone.keep_in')
BASE_FOLDER = 'base'  # below the workdir: the model under adapters


@struct.dataclass
class Frozen:
    """Parameters that a run reads and never changes."""

    model: Params  # under the adapters of policy and critic; {} without LoRA
    reference: Params | None  # what was trained, as it was at step 0; None if no loss asks for it


def stream_key(run: Any, stream: int, step: int = 0) -> jax.Array:
    """The random stream of one purpose at one step; nothing else in a run is random.

    Each roll back brings new levels and new episodes: with the old ones it would collapse again.
    """
    if stream in (LEVELS, COLLECT, REFILL):
        stream += AFTER_ROLL_BACK * run.roll_backs
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(run.cfg.seed), stream), step)


def config_dict(cfg: Any) -> dict:
    return json.loads(cfg.to_json_best_effort())


def saved_beside(run: Any) -> dict:
    """What a checkpoint holds beside the state."""
    return {'config': config_dict(run.cfg), 'roll_backs': run.roll_backs}


def abstract_of(tree: Any) -> Any:
    """Shapes, dtypes and layouts of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def with_layout(tree: Any, layout: Any) -> Any:
    """Shapes and dtypes with one layout for all arrays, or with a tree of layouts."""

    def one(x, at):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    if isinstance(layout, jax.sharding.Sharding):
        return jax.tree.map(lambda x: one(x, layout), tree)
    return jax.tree.map(one, tree, layout)


def policy_of(params: Params, base: Params) -> Params:
    """The parameters a rollout needs: with the base, without a value head on a shared backbone."""
    return {**base, **{name: part for name, part in params.items() if name != 'value_head'}}


def trained_part(params: Params, cfg: Any, index: int) -> Params:
    """What is trained of a model: all of it, or adapters (number 0 for policy, 1 for critic)."""
    if not cfg.lora.rank:
        return dict(params)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.seed), ADAPTERS), index)
    targets = lora.target_names(cfg.lora.targets)
    return {'lora': lora.init(key, params['model'], rank=cfg.lora.rank, targets=targets)}


def trained_policy(params: Params, cfg: Any, config: Any) -> Params:
    """TrainState.params of step 0: the policy's part, with the head of a critic that shares it."""
    trained = trained_part(params, cfg, 0)
    if parts.needs_critic(cfg) and cfg.critic.share_backbone:
        trained['value_head'] = critic.init_head(config)
    return trained


def player_of(state: TrainState, base: Params) -> Params:
    """The parameters that play episodes: the policy, or the explorer of AgentEvol."""
    return policy_of(state.params if state.explorer is None else state.explorer, base)


def make_state(params: Any, cfg: Any, config: Any, txs: tuple) -> TrainState:
    """State of step 0 around the given policy parameters; pure."""
    policy, critic_params, critic_opt_state = trained_policy(params, cfg, config), None, None
    if parts.needs_critic(cfg) and not cfg.critic.share_backbone:
        critic_params = critic.init(trained_part(params, cfg, 1), config)
        critic_opt_state = txs[1].init(critic_params)
    return TrainState(
        step=jnp.int32(0),
        params=policy,
        opt_state=txs[0].init(policy),
        critic_params=critic_params,
        critic_opt_state=critic_opt_state,
        kl_coef=jnp.float32(cfg.loss.kl_coef),
        skipped=jnp.int32(0),
        explorer=jax.tree.map(jnp.copy, policy) if parts.explores(cfg) else None,
    )


def start_state(run: Any, params: Any) -> TrainState:
    """State of step 0 around the given policy parameters, laid out over the mesh."""
    make = functools.partial(make_state, cfg=run.cfg, config=run.config, txs=run.txs)
    layout = sharding.state_specs(jax.eval_shape(make, params), sharding.TRAIN_RULES, run.mesh)
    return jax.jit(make, out_shardings=layout)(params)


def abstract_state(run: Any) -> TrainState:
    """Shapes, dtypes and layouts of start_state(run, run.params)."""
    state = jax.eval_shape(
        functools.partial(make_state, cfg=run.cfg, config=run.config, txs=run.txs), run.params
    )
    return with_layout(state, sharding.state_specs(state, sharding.TRAIN_RULES, run.mesh))


def demonstrations(run: Any) -> sft.Demonstrations:
    """Those of cfg.clone.file, or our own: oracle and random play of the training levels."""
    cfg = run.cfg
    if cfg.clone.file:
        records = trajectories.read_records(cfg.clone.file)
        found, dropped = trajectories.demonstrations_of(
            records,
            run.tokenizer,
            max_tokens=cfg.rollout.max_tokens,
            answer_prefix='<think>' if cfg.env.think else '<answer>',
        )
        if dropped:
            print(
                f'WARNING: {dropped} of {len(records)} trajectories of {cfg.clone.file} have more '
                f'than rollout.max_tokens={cfg.rollout.max_tokens} tokens and are left out',
                file=sys.stderr,
                flush=True,
            )
        return found

    task = run.task
    if check.demonstrates_apart(cfg):
        cfg = with_clone_limits(cfg)
        task = parts.build_text_task(cfg, run.tokenizer, 'train', run.mesh)

    def expert(states, used):
        return experts.plans(
            task.env, task.env_params, states, used, cfg.env.max_actions_per_episode
        )

    with Progress(task.max_turns, 'demonstrating') as progress:
        return sft.demonstrate(
            task,
            run.tokenizer,
            expert,
            seed=cfg.seed,
            episodes=cfg.clone.episodes,
            oracle=cfg.clone.oracle,
            max_tokens=cfg.rollout.max_tokens,
            report=progress.advance,
        )


def with_clone_limits(cfg: Any) -> Any:
    """The config with the limits of own demonstrations in the place of the run's."""
    cfg = copy.deepcopy(cfg)
    for section, field in clones.LIMITS:
        cfg[section][field] = cfg.clone[field] or cfg[section][field]
    return cfg


def clone(run: Any, shown: sft.Demonstrations | None) -> Any:
    """Behaviour-cloned policy parameters; None: of demonstrations made for it."""
    shown = demonstrations(run) if shown is None else shown
    cfg, fns = run.cfg, parts.model_functions(run.cfg, run.config, run.mesh)
    with Progress(cfg.clone.steps, 'cloning') as progress:
        return sft.clone(
            run.params,
            shown,
            stream_key(run, CLONE),
            hidden_fn=fns.hidden,
            head_fn=fns.head,
            tx=parts.clone_optimiser(cfg),
            steps=cfg.clone.steps,
            batch_size=cfg.clone.batch,
            chunk_size=cfg.batch.head_chunk,
            microbatch_rows=cfg.clone.microbatch_rows or None,
            row_sharding=sharding.shard_rows(run.mesh),
            report=lambda step, loss: progress.advance(1, loss=loss),
        )


def open_state(run: Any, checkpoints: Any) -> tuple[TrainState, Frozen, Any]:
    """(state, what stays as it is, demonstrations that join batches or None).

    The state is that of the newest checkpoint, or a fresh step 0.
    """
    workdir = checkpoints.directory.parent
    fresh = checkpoint.latest_step(checkpoints) is None
    params, joins = run.params, check.base_rows(run.cfg) > 0
    shown = demonstrations(run) if joins else None
    if fresh and check.clones(run.cfg):
        make = functools.partial(clone, run, shown)
        params = clones.kept(config_dict(run.cfg), workdir, abstract_of(params), make)
    state = start_state(run, params) if fresh else abstract_state(run)
    if fresh:
        keep_base(run.cfg, workdir, params)  # first: a checkpoint is of no use without it
        checkpoint.save(checkpoints, 0, state, saved_beside(run))
        if jax.process_count() > 1:  # Orbax names barriers by the step: one folder at a time
            checkpoint.wait(checkpoints)
    else:
        saved = checkpoint.read_extra(checkpoints.directory)
        checkpoint.check_config(saved['config'], config_dict(run.cfg), may_differ=MAY_DIFFER)
        state, _ = checkpoint.restore(checkpoints, state)
    model = params if fresh and run.cfg.lora.rank else open_base(run.cfg, workdir, run.params)
    reference = None
    if parts.needs_reference(run.cfg) or parts.explores(run.cfg):
        reference = open_reference(run, workdir, policy_of(state.params, {}), fresh)
    if not parts.needs_reference(run.cfg):
        reference = None  # it lies on disk until the next iteration begins
    return state, Frozen(model, reference), jax.device_get(shown) if joins else None


def base_is_given(cfg: Any) -> bool:
    """Does the base come from model.path, as it is? Then nothing is kept of it."""
    cloned = cfg['clone']['file'] or cfg['clone']['episodes']
    return bool(cfg['model']['path']) and not cloned


def keep_base(cfg: Any, workdir: Path, params: Params) -> None:
    """Stores the parameters under the adapters, unless there are none or model.path has them."""
    if not cfg.lora.rank or base_is_given(cfg):
        return
    kept = checkpoint.open_checkpoints(workdir / BASE_FOLDER, keep=1, async_=False)
    if not checkpoint.save(kept, 0, {'params': params}, {}):
        stored = open_base(cfg, workdir, params)
        if not jax.jit(equal)(stored, params):
            raise ValueError(
                f'{workdir / BASE_FOLDER} holds the base of another run, which ended before its '
                'first checkpoint; remove the folder'
            )
    checkpoint.close(kept)


def equal(one: Any, other: Any) -> jax.Array:
    """bool []: are all arrays of two trees the same?"""
    same = jax.tree.map(lambda a, b: (a == b).all(), one, other)
    return jnp.stack(jax.tree.leaves(same)).all()


def open_base(cfg: Any, workdir: Path | str, params: Params) -> Params:
    """The frozen parameters of a run with the config cfg (or its JSON); {} without LoRA.

    params: those of model.path, or of the same shapes and layout.
    """
    if not cfg['lora']['rank']:
        return {}
    if base_is_given(cfg):
        return params
    return checkpoint.load_params_only(Path(workdir) / BASE_FOLDER, abstract_of(params))


def saved_policy(
    cfg: Any, config: Any, mesh: Any, params: Params, workdir: str, *, step: int | None = None
) -> Params:
    """The policy of a checkpoint, adapters and base; params: as in open_base."""
    abstract = jax.eval_shape(functools.partial(trained_policy, cfg=cfg, config=config), params)
    layout = sharding.specs(abstract, sharding.TRAIN_RULES, mesh)
    trained = checkpoint.load_params_only(workdir, with_layout(abstract, layout), step=step)
    saved = checkpoint.read_extra(workdir, step=step)['config'] | {'lora': cfg.lora}
    return policy_of(trained, open_base(saved, workdir, params))


def open_reference(run: Any, workdir: Path, start: Any, fresh: bool) -> Any:
    """The policy of step 0, kept beside the checkpoints, for KL terms, DPO and AgentEvol."""
    kept = checkpoint.open_checkpoints(workdir / 'reference', keep=1, async_=False)
    if fresh or checkpoint.latest_step(kept) is None:
        checkpoint.save(kept, 0, {'params': start}, {})
    reference, _ = checkpoint.restore(kept, {'params': abstract_of(start)})
    checkpoint.close(kept)
    return reference['params']


def next_iteration(run: Any, state: TrainState, step: int, workdir: Path) -> TrainState:
    """AgentEvol: at the first step of an iteration explorer and learner change; else nothing."""
    cfg = run.cfg
    if not parts.explores(cfg) or step == 0 or step % cfg.evol.iteration:
        return state
    start = None
    if cfg.evol.restart:
        start = open_reference(run, workdir, policy_of(state.params, {}), fresh=False)
    return evol.begin_iteration(state, run.txs[0], start)


def base_rows(run: Any, base: Any, step: int) -> Any:
    """Demonstrations that join the episodes of a step, laid out by rows; None if there are none."""
    if base is None:
        return None
    cfg = run.cfg
    drawn = evol.draw(
        base,
        stream_key(run, BASE, step),
        rows=check.base_rows(cfg),
        max_tokens=cfg.rollout.max_tokens,
        pad_id=run.tokenizer.pad_id,
    )
    return jax.device_put(drawn, sharding.shard_rows(run.mesh))
