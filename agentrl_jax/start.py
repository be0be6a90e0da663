"""Where a run starts: random or given weights, perhaps cloned, or the newest checkpoint."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax import assemble, checkpoint, sft, sharding
from agentrl_jax.envs import experts
from agentrl_jax.models import critic
from agentrl_jax.progress import Progress
from agentrl_jax.types import TrainState

LEVELS, COLLECT, EVALUATE, CLONE, SHUFFLE, REFILL, PAIRS = range(7)  # random streams of a run
AFTER_ROLL_BACK = 1 << 20  # streams of training after a roll back lie from here on
MAY_DIFFER = ('steps', 'log', 'checkpoint', 'mesh', 'alarm')  # what a resumed run may change


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


def policy_of(params: Any) -> Any:
    """The parameters a rollout needs: without a value head on a shared backbone."""
    return {name: part for name, part in params.items() if name != 'value_head'}


def make_state(params: Any, cfg: Any, config: Any, txs: tuple) -> TrainState:
    """State of step 0 around the given policy parameters; pure."""
    params, critic_params, critic_opt_state = dict(params), None, None
    if assemble.needs_critic(cfg):
        if cfg.critic.share_backbone:
            params['value_head'] = critic.init_head(config)
        else:
            critic_params = critic.init(params, config)
            critic_opt_state = txs[1].init(critic_params)
    return TrainState(
        step=jnp.int32(0), params=params, opt_state=txs[0].init(params),
        critic_params=critic_params, critic_opt_state=critic_opt_state,
        kl_coef=jnp.float32(cfg.loss.kl_coef), skipped=jnp.int32(0),
    )  # fmt: skip


def start_state(run: Any, params: Any) -> TrainState:
    """State of step 0 around the given policy parameters, laid out over the mesh."""
    make = functools.partial(make_state, cfg=run.cfg, config=run.config, txs=run.txs)
    layout = sharding.state_specs(jax.eval_shape(make, params), sharding.TRAIN_RULES, run.mesh)
    return jax.jit(make, out_shardings=layout)(params)


def clone_demonstrations(run: Any) -> Any:
    """Behaviour-cloned policy parameters: demonstrations of oracle and random play, then SFT."""
    cfg, fns = run.cfg, assemble.model_functions(run.cfg, run.config, run.mesh)

    def expert(states, used):
        return experts.plans(
            run.task.env, run.task.env_params, states, used, cfg.env.max_actions_per_episode
        )

    with Progress(run.task.max_turns, 'demonstrating') as progress:
        demonstrations = sft.demonstrate(
            run.task, run.tokenizer, expert, seed=cfg.seed, episodes=cfg.clone.episodes,
            oracle=cfg.clone.oracle, max_tokens=cfg.rollout.max_tokens, report=progress.advance,
        )  # fmt: skip
    with Progress(cfg.clone.steps, 'cloning') as progress:
        return sft.clone(
            run.params, demonstrations, stream_key(run, CLONE),
            hidden_fn=fns.hidden, head_fn=fns.head, tx=assemble.clone_optimiser(cfg),
            steps=cfg.clone.steps, batch_size=cfg.clone.batch,
            chunk_size=cfg.batch.head_chunk,
            report=lambda step, loss: progress.advance(1, loss=loss),
        )  # fmt: skip


def open_state(run: Any, checkpoints: Any) -> tuple[TrainState, Any]:
    """(state, reference policy or None): of the newest checkpoint, or a fresh step 0."""
    fresh = checkpoint.latest_step(checkpoints) is None
    params = run.params
    if fresh and run.cfg.clone.episodes:
        params = clone_demonstrations(run)
    state = start_state(run, params)
    if fresh:
        checkpoint.save(checkpoints, 0, state, saved_beside(run))
    else:
        saved = checkpoint.read_extra(checkpoints.directory)
        checkpoint.check_config(saved['config'], config_dict(run.cfg), may_differ=MAY_DIFFER)
        state, _ = checkpoint.restore(checkpoints, abstract_of(state))
    if not assemble.needs_reference(run.cfg):
        return state, None
    return state, open_reference(run, checkpoints.directory.parent, policy_of(state.params), fresh)


def open_reference(run: Any, workdir: Path, start: Any, fresh: bool) -> Any:
    """The policy that KL terms hold on to: that of step 0, kept beside the checkpoints."""
    kept = checkpoint.open_checkpoints(workdir / 'reference', keep=1, async_=False)
    if fresh or checkpoint.latest_step(kept) is None:
        checkpoint.save(kept, 0, {'params': start}, {})
    reference, _ = checkpoint.restore(kept, {'params': abstract_of(start)})
    checkpoint.close(kept)
    return reference['params']
