"""The start of a run: random, loaded or cloned weights, or the newest checkpoint."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.envs import HOSTS, WORLDS
from agentrl_jax.machine import checkpoint, files, sharding
from agentrl_jax.models import critic
from agentrl_jax.models.functions import split_critic
from agentrl_jax.rl import evol
from agentrl_jax.run import hooks
from agentrl_jax.run import params as stored
from agentrl_jax.run.cloning import cloned_policy, find_demonstrations
from agentrl_jax.run.config import Config
from agentrl_jax.run.migration import canonical_json, following, to_metadata
from agentrl_jax.run.run import Run
from agentrl_jax.run.usage import WrongUsage, checked
from agentrl_jax.types import Demonstrations, FrozenParams, Params, TrainState

# How environments on hosts are reached, and timeouts
REACHED = 'timeout_s tries outage_s min_healthy token call_s launch room'
HOST_CONNECTION_FIELDS = tuple(f'hosts.{name}' for name in REACHED.split())
# Fields that define those environments
HOST_TASK_FIELDS = tuple(
    f'hosts.{name}' for name in 'instruction prompt num_items deterministic'.split()
)
# Fields that a resumed run may change
CHANGEABLE_ON_RESUME = (*('steps', 'log', 'checkpoint', 'mesh', 'alarm'), *HOST_CONNECTION_FIELDS)

# Fields of an environment on hosts: its address, and timeouts
CONNECTION_FIELDS = ('urls', 'url', 'workers', 'start_s', 'silent_s', 'port')


@dataclasses.dataclass(frozen=True)
class RunState:
    """The state that a run continues from."""

    state: TrainState
    frozen: FrozenParams
    base: Demonstrations | None  # demonstrations that are added to batches (AgentEvol)


def changeable_world_fields(cfg: Config) -> set[str]:
    """Return the environment fields that may change: connections of the run's environments, and
    all fields of other environments, since their defaults may change between versions."""
    free = WORLDS.keys() - set(cfg.env.worlds)
    free |= set() if HOSTS.keys() & cfg.env.worlds else set(HOST_TASK_FIELDS)
    free |= {f'{name}.{field}' for name in cfg.env.worlds for field in CONNECTION_FIELDS}
    if any(getattr(world, 'corpus', '').startswith('http') for world in cfg.worlds):
        free |= {f'{name}.corpus' for name in cfg.env.worlds}
    return free


def checkpoint_metadata(run: Run) -> dict[str, Any]:
    """Return the metadata that a checkpoint holds in addition to the state."""
    saved = to_metadata(run.config_dict) | stored.start_of(run.config, run.model, run.params)
    for addition in run.additions:
        saved |= addition.saved()
    return saved


def make_state(params: Any, cfg: Config, config: Any, optimizers: tuple) -> TrainState:
    """Return the state of step 0 with the given policy parameters; a pure function."""
    policy = stored.initial_trainable_params(params, cfg, config)
    critic_params = critic_opt_state = None
    if cfg.algorithm.USES_CRITIC and not cfg.critic.share_backbone:
        critic_params = critic.init(stored.trainable_params(params, cfg, 1), config)
        trained, _ = split_critic(critic_params, freeze_attention=cfg.critic.freeze_attention)
        critic_opt_state = optimizers[1].init(trained)
    return TrainState(
        step=jnp.int32(0),
        params=policy,
        opt_state=optimizers[0].init(policy),
        critic_params=critic_params,
        critic_opt_state=critic_opt_state,
        skipped=jnp.int32(0),
        explorer=jax.tree.map(jnp.copy, policy) if cfg.algorithm.EXPLORES else None,
        extra={n: x for one in cfg.extensions for n, x in one.start_state(policy).items()},
    )


def _make_state(run: Run) -> Callable[[Params], TrainState]:
    return functools.partial(
        make_state, cfg=run.config, config=run.model, optimizers=run.optimizers
    )


def start_state(run: Run, params: Any) -> TrainState:
    """Return the state of step 0 with the given policy parameters, laid out over the mesh."""
    make = _make_state(run)
    layout = sharding.specs(jax.eval_shape(make, params), sharding.TRAIN_RULES, run.mesh)
    return jax.jit(make, out_shardings=layout)(params)


def abstract_state(run: Run) -> TrainState:
    """Return shapes, dtypes and layouts of start_state(run, run.params)."""
    state = jax.eval_shape(_make_state(run), run.params)
    return sharding.with_layout(state, sharding.specs(state, sharding.TRAIN_RULES, run.mesh))


def open_run(
    run: Run, workdir: Path, *, fallback: bool = False
) -> tuple[checkpoint.Checkpoints, RunState]:
    """Open a workdir's checkpoints and the state to continue from.

    fallback: use an older checkpoint if newer ones are damaged, instead of checkpoint.Damaged.
    """
    if fallback:
        checkpoint.rename_damaged(workdir)
    checkpoints = checkpoint.open_checkpoints(workdir, keep=run.config.checkpoint.keep)
    return checkpoints, restore_or_init(run, checkpoints)


def restore_or_init(run: Run, checkpoints: checkpoint.Checkpoints) -> RunState:
    """Restore the newest checkpoint, or make the state of step 0."""
    workdir = checkpoints.directory.parent
    joins = run.config.base_rows > 0
    examples = find_demonstrations(run, workdir) if joins else None
    if checkpoint.latest_step(checkpoints) is None:
        clones = run.config.clone.demonstrates
        params = cloned_policy(run, examples, workdir) if clones else run.params
        state = start_state(run, params)
        # Before the checkpoint, which is useless without it
        stored.save_base(run.config, workdir, params)
        checkpoint.save(checkpoints, 0, state, checkpoint_metadata(run))
        if jax.process_count() > 1:  # Orbax names barriers by the step: one folder at a time
            checkpoint.wait(checkpoints)
        model = params if run.config.lora.rank else {}
    else:
        if (step := checkpoint.latest_step(checkpoints)) > run.config.steps:
            raise WrongUsage(
                f'{workdir} is at step {step} already, and steps={run.config.steps}: set steps to '
                f'at least {step}, or use another workdir'
            )
        saved = checkpoint.read_extra(checkpoints.directory)
        if saved.get('roll_backs'):
            raise WrongUsage(
                f'{workdir} was rolled back to an earlier checkpoint after an alarm, which this '
                'version does not support; commit 55cb303 is the last one that resumes it'
            )
        before, now = canonical_json(saved), canonical_json(to_metadata(run.config_dict))
        free = [*CHANGEABLE_ON_RESUME, *changeable_world_fields(run.config)]
        free += [name for part in run.config.extensions for name in part.FREE_ON_RESUME]
        with checked():
            follow = following(before, now)
            checkpoint.check_config(before, now, may_differ=free, follow=follow)
            for addition in run.additions:
                addition.check(saved)
            stored.check_sizes(run.config, run.model, saved)
        state, _ = checkpoint.restore(checkpoints, abstract_state(run))
        model = stored.load_base(run.config, workdir, run.params, saved)
    reference = open_reference(run, workdir, state)
    return RunState(
        state=state,
        frozen=FrozenParams(model, reference, extra_arrays(run)),
        base=jax.device_get(examples) if joins else None,
    )


def extra_arrays(run: Run) -> dict[str, Any]:
    """Return FrozenParams.extra of a run."""
    place = functools.partial(sharding.replicate, mesh=run.mesh)
    return hooks.frozen_of(run.additions, run.training.tasks[0], place)


def open_reference(run: Run, workdir: Path, state: TrainState) -> Params | None:
    """Return the policy of step 0 if a loss needs it; save it first if the run is at step 0."""
    if not run.config.saves_initial_policy:
        return None
    policy = stored.policy_of(state.params, {})
    folder = workdir / stored.REFERENCE_FOLDER
    if int(state.step) == 0:
        checkpoint.save_params(folder, policy)
    elif not folder.is_dir():
        raise FileNotFoundError(
            f'{folder} is missing: it holds the policy of step 0, which this run is compared with. '
            'Restore it, or start over in another workdir'
        )
    # AgentEvol's start policy stays on disk until the next iteration starts
    needed = run.config.algorithm.uses_reference
    return stored.load_initial_policy(workdir, policy) if needed else None


def start_iteration(run: Run, state: TrainState, workdir: Path) -> TrainState:
    """Replace explorer and learner at the start of an AgentEvol iteration."""
    start = stored.load_initial_policy(workdir, stored.policy_of(state.params, {}))
    return evol.begin_iteration(state, run.optimizers[0], start)


def disk_bytes_needed(run: Run, workdir: Path) -> int:
    """Return the bytes that a run still needs in its workdir, at its peak."""
    cfg, state = run.config, jax.eval_shape(functools.partial(start_state, run), run.params)
    base = run.params if cfg.lora.rank and not stored.base_is_in_model_path(cfg) else {}
    policies = (
        cfg.saves_initial_policy + 2 * cfg.checkpoint.best
    )  # a new best is saved before the old goes
    need = checkpoint.state_bytes(state) * (cfg.checkpoint.keep + 1) + checkpoint.state_bytes(base)
    need += checkpoint.state_bytes(state.params) * policies
    folders = (checkpoint.FOLDER, stored.BASE_FOLDER, stored.REFERENCE_FOLDER, stored.BEST_FOLDER)
    return max(need - sum(files.size_of(workdir / name) for name in folders), 0)
