"""Where a run starts: random or given weights, perhaps cloned, or the newest checkpoint."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from agentrl_jax.envs import ENVIRONMENTS, GAMES
from agentrl_jax.envs.hosts import HOSTS
from agentrl_jax.imitation import kept
from agentrl_jax.machine import checkpoint, frozen, sharding
from agentrl_jax.models import critic
from agentrl_jax.rl import evol
from agentrl_jax.run import derived
from agentrl_jax.run.build import Run
from agentrl_jax.run.cloning import cloned_policy, find_demonstrations
from agentrl_jax.run.effective import effective, idle
from agentrl_jax.run.params import (
    REFERENCE_FOLDER,
    Frozen,
    keep_base,
    open_base,
    open_start,
    policy_of,
    trained_part,
    trained_policy,
)
from agentrl_jax.run.streams import Streams
from agentrl_jax.types import Demonstrations, Params, TrainState
from configs import base

# What a resumed run may change
MAY_DIFFER = (
    'steps',
    'log',
    'checkpoint',
    'mesh',
    'alarm',
    'clone.keep_in',
    'fork.value_every',
    *(f'hosts.{name}' for name in ('poll', 'timeout_s', 'tries', 'outage_s', 'min_healthy')),
)


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a run continues from."""

    state: TrainState
    frozen: Frozen
    base: Demonstrations | None  # demonstrations that join batches (AgentEvol)
    streams: Streams


def config_dict(cfg: Any) -> dict:
    return json.loads(cfg.to_json_best_effort())


def with_later_fields(saved: dict) -> dict:
    """The config of an older run, with the fields that came after it at their defaults."""

    def filled(defaults, section):
        return {
            name: filled(value, section.get(name, {})) if isinstance(value, dict) else value
            for name, value in defaults.items()
        } | {name: x for name, x in section.items() if not isinstance(x, dict)}

    return saved | filled(config_dict(base.get_config()), saved)


def comparable(saved: dict) -> dict:
    """A config as JSON by what it does: unset fields have their values, idle ones none.

    Configs of older runs say of fields without effect what they had in them.
    """
    cfg = effective(ml_collections.ConfigDict(with_later_fields(saved)))
    found = config_dict(cfg)
    for name in idle(cfg):
        section, leaf = name.split('.')
        found[section][leaf] = None
    return found


def unplayed(cfg: Any) -> set[str]:
    """Sections of worlds that a run does not play, whose defaults a later version may change."""
    return {*ENVIRONMENTS, *GAMES, *HOSTS} - {*derived.worlds(cfg), *cfg.eval.worlds}


def saved_beside(cfg: Any, streams: Streams) -> dict:
    """What a checkpoint holds beside the state."""
    return {'config': config_dict(cfg), 'roll_backs': streams.roll_backs}


def make_state(params: Any, cfg: Any, config: Any, txs: tuple) -> TrainState:
    """State of step 0 around the given policy parameters; pure."""
    policy, critic_params, critic_opt_state = trained_policy(params, cfg, config), None, None
    if derived.needs_critic(cfg) and not cfg.critic.share_backbone:
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
        explorer=jax.tree.map(jnp.copy, policy) if derived.explores(cfg) else None,
    )


def start_state(run: Run, params: Any) -> TrainState:
    """State of step 0 around the given policy parameters, laid out over the mesh."""
    make = functools.partial(make_state, cfg=run.cfg, config=run.config, txs=run.txs)
    layout = sharding.specs(jax.eval_shape(make, params), sharding.TRAIN_RULES, run.mesh)
    return jax.jit(make, out_shardings=layout)(params)


def abstract_state(run: Run) -> TrainState:
    """Shapes, dtypes and layouts of start_state(run, run.params)."""
    state = jax.eval_shape(
        functools.partial(make_state, cfg=run.cfg, config=run.config, txs=run.txs), run.params
    )
    layout = sharding.specs(state, sharding.TRAIN_RULES, run.mesh)
    return sharding.with_layout(state, layout)


def open_state(run: Run, checkpoints: checkpoint.Checkpoints, streams: Streams) -> Opened:
    """What to continue from: the newest checkpoint, or a fresh step 0."""
    workdir = checkpoints.directory.parent
    joins = derived.base_rows(run.cfg) > 0
    examples = find_demonstrations(run) if joins else None
    if checkpoint.latest_step(checkpoints) is None:
        params = first_params(run, workdir, examples)
        state = start_state(run, params)
        keep_base(run.cfg, workdir, params)  # first: a checkpoint is of no use without it
        checkpoint.save(checkpoints, 0, state, saved_beside(run.cfg, streams))
        if jax.process_count() > 1:  # Orbax names barriers by the step: one folder at a time
            checkpoint.wait(checkpoints)
        model = params if run.cfg.lora.rank else {}
    else:
        saved = checkpoint.read_extra(checkpoints.directory)
        before, now = comparable(saved['config']), comparable(config_dict(run.cfg))
        checkpoint.check_config(before, now, may_differ=(*MAY_DIFFER, *unplayed(run.cfg)))
        state, _ = checkpoint.restore(checkpoints, abstract_state(run))
        model = open_base(run.cfg, workdir, run.params)
    reference = open_reference(run, workdir, state)
    return Opened(
        state=state,
        frozen=Frozen(model, reference),
        base=jax.device_get(examples) if joins else None,
        streams=streams,
    )


def first_params(run: Run, workdir: Path, examples: Demonstrations | None) -> Params:
    """Parameters of step 0: those of the run, or cloned from demonstrations."""
    if not derived.clones(run.cfg):
        return run.params
    make = functools.partial(cloned_policy, run, examples)
    return kept.kept(config_dict(run.cfg), workdir, sharding.abstract_of(run.params), make)


def open_reference(run: Run, workdir: Path, state: TrainState) -> Params | None:
    """The policy of step 0 if some loss asks for it; kept beside the checkpoints at step 0."""
    if not derived.keeps_start(run.cfg):
        return None
    policy = policy_of(state.params, {})
    folder = workdir / REFERENCE_FOLDER
    if int(state.step) == 0:
        frozen.keep(folder, policy)
    elif not folder.is_dir():
        raise FileNotFoundError(
            f'{folder} is missing: it holds the policy of step 0, which this run is compared with; '
            'put it back, or start anew in another workdir'
        )
    # AgentEvol's start policy lies on disk until the next iteration begins
    return open_start(workdir, policy) if derived.needs_reference(run.cfg) else None


def next_iteration(run: Run, state: TrainState, step: int, workdir: Path) -> TrainState:
    """AgentEvol: at the first step of an iteration explorer and learner change; else nothing."""
    cfg = run.cfg
    if not derived.begins_iteration(cfg, step):
        return state
    start = open_start(workdir, policy_of(state.params, {})) if cfg.evol.restart else None
    return evol.begin_iteration(state, run.txs[0], start)


def space_needed(run: Run) -> int:
    """Bytes of the checkpoints that are on disk at once."""
    state = jax.eval_shape(functools.partial(start_state, run), run.params)
    once = run.params if run.cfg.lora.rank or derived.keeps_start(run.cfg) else {}
    keep = run.cfg.checkpoint.keep + 1
    return checkpoint.state_bytes(state) * keep + checkpoint.state_bytes(once)
