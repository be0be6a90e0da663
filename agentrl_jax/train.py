"""Training: collect -> keep groups -> score -> make_batch -> update. Read this first.

  python -m agentrl_jax.train --config=configs/demo.py --workdir=runs/demo [--config.field=value]

The same command resumes from the newest checkpoint. Everything random is a function of (seed,
step), so a run that was killed and resumed ends with the same bits as one that was not.
"""

import sys

from agentrl_jax.machine import processes

if __name__ == '__main__':
    # First of all: gymnax computes a constant when it is imported, and that starts the backend.
    try:
        processes.initialize_distributed()
    except ValueError as error:
        sys.exit(f'error: {error}')

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import config_flags

from agentrl_jax.algorithms import ALGORITHMS
from agentrl_jax.machine import checkpoint, profiling, sharding
from agentrl_jax.measure import metrics, mutual_information, validation
from agentrl_jax.records import pages, report, run_log
from agentrl_jax.records.progress import Progress
from agentrl_jax.rl import batches, filtering, score, update
from agentrl_jax.rollout import windows
from agentrl_jax.run import check, collecting, parts, roll_back
from agentrl_jax.run import settings as assemble_update
from agentrl_jax.run.state import (
    COLLECT,
    EVALUATE,
    PAIRS,
    SHUFFLE,
    abstract_of,
    base_rows,
    next_iteration,
    open_state,
    player_of,
    policy_of,
    saved_beside,
    start_state,
    stream_key,
)
from agentrl_jax.types import TrainState

WARM_UP_STEPS = 2  # steps in which programs may compile
PAGE_EPISODES = 64  # episodes on a rollout page


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run that do not change: what `build` makes of a config."""

    cfg: Any
    mesh: jax.sharding.Mesh
    tokenizer: Any
    config: Any  # sizes of the model
    params: Any  # parameters as loaded or drawn, before cloning
    task: Any  # the training environment as text
    eval_task: Any
    collect: Any  # jitted (params, task, episodes, key) -> (rollout, counters)
    collect_eval: Any
    draw: Any  # jitted (key, step, first stream) -> episodes
    pack: Any  # jitted collecting.pack; None without dynamic sampling
    eval_episodes: Any
    count: Any  # jitted (rollout, task) -> sums over its first eval_levels rows
    rollout_metrics: Any  # jitted (rollout, task) -> metrics
    rescore: Any  # jitted (policy, rollout, task) -> log-probabilities [B, T]
    information: Any  # jitted (policy, task, rollout, key) -> collapse/ metrics
    learn: Any  # jitted (state, frozen, rollout, key, task, lr_scale) -> (state, metrics, ...)
    txs: tuple  # optimisers of policy and critic
    roll_backs: int = 0  # so far; each gives training other luck and smaller rates


def learn(
    state,
    frozen,
    rollout,
    key=None,
    task=None,
    lr_scale=1.0,
    base=None,
    *,
    algorithm,
    fns,
    txs,
    group_size,
    settings,
):
    """One update from one rollout: keep groups, score, make the batch, optimise.

    Returns (state, metrics, rows int32 [b] of the update, their advantages float32 [b, T], nan for
    rows that did not train). A key shuffles; base: demonstrations that join the batch.
    """
    fns = parts.on_base(fns, frozen.model)
    samples, rows, advantages, chosen = batches.prepare(
        state,
        frozen.reference,
        rollout,
        task,
        base,
        algorithm=algorithm,
        fns=fns,
        group_size=group_size,
        settings=settings,
    )
    state, measured = update.update_step(
        state,
        samples,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=fns.values,
        value_head_fn=fns.value_head,
        tx=txs[0],
        critic_tx=txs[1],
        key=key,
        lr_scale=lr_scale,
        **settings['update'],
    )
    return state, measured | chosen, rows, advantages


def measure_rollout(rollout, task, *, group_size):
    """Metrics of a rollout, the environment's own included."""
    common = metrics.rollout_metrics(rollout, group_size)
    return common | metrics.environment_metrics(rollout, task)


def rescore(params, rollout, task=None, *, fns, cfg):
    """Log-probabilities of a rollout's tokens under other parameters."""
    window = assemble_update.window_settings(cfg)
    return score.score(
        params,
        None,
        None,
        rollout,
        hidden_fn=fns.hidden,
        head_fn=fns.head,
        values_fn=None,
        windows=None if window is None else windows.windows(task, rollout, **window),
        microbatch_rows=cfg.batch.microbatch_rows,
        temperature=cfg.rollout.temperature,
        chunk_size=cfg.batch.head_chunk,
        recompute=True,
    ).old_logprobs


def build_learn(cfg: Any, mesh: Any, fns: Any, txs: tuple):
    """Jitted learn(state, frozen, rollout, key, task, base); the state is donated."""
    learner = functools.partial(
        learn,
        algorithm=ALGORITHMS[cfg.algorithm],
        fns=fns,
        txs=txs,
        group_size=cfg.rollout.group_size,
        settings=assemble_update.update_settings(cfg, mesh),
    )
    return jax.jit(learner, donate_argnums=0)


def build(cfg: Any) -> Run:
    """Checks the config and assembles its parts; nothing is trained yet."""
    mesh = parts.build_mesh(cfg)
    check.check(cfg, sharding.row_shards(mesh))
    tokenizer = parts.build_tokenizer(cfg)
    task = parts.build_text_task(cfg, tokenizer, 'train', mesh)
    eval_task = parts.build_text_task(cfg, tokenizer, cfg.eval.split, mesh)
    config, params = parts.build_model(cfg, tokenizer, mesh)
    fns = parts.model_functions(cfg, config, mesh)
    txs = parts.build_optimisers(cfg)
    draw = functools.partial(
        parts.draw_episodes,
        levels=task.env.num_levels(task.env_params),
        groups=cfg.rollout.num_groups,
        group_size=cfg.rollout.group_size,
        common=cfg.rollout.common_random_numbers,
    )
    rows, whole = sharding.shard_rows(mesh), NamedSharding(mesh, PartitionSpec())
    return Run(
        cfg=cfg,
        mesh=mesh,
        tokenizer=tokenizer,
        config=config,
        params=params,
        task=task,
        eval_task=eval_task,
        collect=parts.build_collect(cfg, config, mesh, split='train'),
        collect_eval=parts.build_collect(cfg, config, mesh, split=cfg.eval.split),
        draw=jax.jit(draw, out_shardings=rows),
        pack=collecting.build_pack(cfg, assemble_update.build_keep(cfg), rows, whole),
        eval_episodes=jax.device_put(
            parts.every_level(
                cfg.env.eval_levels,
                eval_task.env.num_levels(eval_task.env_params),
                sharding.row_shards(mesh),
            ),
            rows,
        ),
        count=jax.jit(
            functools.partial(validation.count, episodes=cfg.env.eval_levels),
            out_shardings=whole,
        ),
        rollout_metrics=jax.jit(
            functools.partial(measure_rollout, group_size=cfg.rollout.group_size),
            out_shardings=whole,
        ),
        rescore=jax.jit(functools.partial(rescore, fns=fns, cfg=cfg), out_shardings=rows),
        information=jax.jit(
            functools.partial(
                mutual_information.information,
                hidden_fn=fns.hidden,
                head_fn=fns.head,
                layout=whole,
                **parts.information_settings(cfg),
            ),
            out_shardings=whole,
        ),
        learn=build_learn(cfg, mesh, fns, txs),
        txs=txs,
    )


def measure(run: Run, policy: Any) -> dict[str, float]:
    """Validation: one episode on each level of the held-out pool, the same luck every time."""
    rollout, counters = run.collect_eval(
        policy, run.eval_task, run.eval_episodes, stream_key(run, EVALUATE)
    )
    collecting.check_counters(counters)
    return validation.summarise(run.count(rollout, run.eval_task))


def train_step(
    run: Run, state: TrainState, frozen: Any, base: Any, step: int, first: bool
) -> tuple:
    """One cycle; (state, metrics on the device, what a rollout page needs).

    first: the first step of this process, which compiles all that later steps need.
    """
    every, policy = run.cfg.alarm.mi_every, player_of(state, frozen.model)
    began = time.monotonic()
    horizon = parts.turn_limit(run.cfg, step)
    task = run.task.replace(turn_limit=np.int32(horizon))  # an argument: no new program
    (rollout, episodes), sampled, measured = collecting.collect(run, policy, task, step)
    collected = time.monotonic()
    if every and (first or step % every == 0):
        known = run.information(policy, run.task, rollout, stream_key(run, PAIRS, step))
        measured |= {} if step % every else known
    shuffle = stream_key(run, SHUFFLE, step) if run.cfg.batch.shuffle else None
    lr_scale = np.float32(run.cfg.alarm.roll_back_lr**run.roll_backs)
    state, more, rows, advantages = run.learn(
        state, frozen, rollout, shuffle, run.task, lr_scale, base_rows(run, base, step)
    )
    measured = more | measured | {'rollout/horizon': horizon, 'rollout/sampled': sampled}
    measured['time/collect_s'] = collected - began
    return state, measured, (rollout, episodes, stream_key(run, COLLECT, step), rows, advantages)


def save_page(run: Run, workdir: Path, step: int, policy: Any, seen: tuple) -> None:
    """The rollout of a step as a page, with the ratios its update led to."""
    rollout, episodes, key, rows, advantages = jax.tree.map(validation.fetch, seen[:2]) + seen[2:]
    after = validation.fetch(run.rescore(policy, seen[0], run.task))
    spread = np.full(rollout.tokens.shape, np.nan, np.float32)
    spread[validation.fetch(rows)] = validation.fetch(advantages)
    if jax.process_index() == 0:
        pages.write(
            workdir,
            f'step_{step:06d}',
            rollout,
            task=run.task,
            tokenizer=run.tokenizer,
            streams=episodes.world_stream,
            key=key,
            group_size=run.cfg.rollout.group_size,
            title=f'training rollout of step {step}',
            extras={'ratio': np.exp(after - rollout.logprobs), 'advantages': spread},
            limit=PAGE_EPISODES,
        )


def train(cfg: Any, workdir: str) -> int:
    """Runs or resumes a run; returns the exit code (0, or 75 when asked to stop early)."""
    run = build(cfg)
    workdir = processes.check_workdir(workdir, min_free_bytes=space_needed(run))
    speaks = jax.process_index() == 0
    if speaks:
        report.write_reference(workdir, run.eval_task)
    code = None
    while code is None:  # after a roll back the run resumes as if it had been killed
        run = dataclasses.replace(run, roll_backs=roll_back.settle(workdir))
        checkpoints = checkpoint.open_checkpoints(workdir, keep=cfg.checkpoint.keep)
        opened = open_state(run, checkpoints)
        if not cfg.lora.rank:  # the state has its own copy; adapters lie on this one
            run = dataclasses.replace(run, params=abstract_of(run.params))
        code = play(run, *opened, checkpoints, workdir)
    if speaks and code == 0:
        report.write_curves(workdir, f'{cfg.algorithm} on {cfg.env.name}')
        print(report.summary(workdir, f'python -m agentrl_jax.train {" ".join(sys.argv[1:])}'))
        run_log.write_finished(workdir, cfg.steps)
    return code


def play(run, state, frozen, base, checkpoints, workdir: Path) -> int | None:
    """From the state to the end: an exit code, or None after a roll back."""
    cfg, first = run.cfg, int(state.step)
    if jax.process_index() == 0:
        run_log.write_config(workdir, cfg, sys.argv)
    with (
        run_log.RunLog(
            workdir,
            resume_step=first,
            tensorboard=cfg.log.tensorboard,
            wandb_project=cfg.log.wandb_project,
            config=cfg,
            process_index=jax.process_index(),
        ) as log,
        processes.Preemption() as preemption,
        Progress(cfg.steps, 'training', done=first) as progress,
        profiling.Trace(
            workdir, first=first + WARM_UP_STEPS, last=last_traced(cfg, first)
        ) as trace,
    ):
        models = (frozen, base)
        code, state = loop(
            run, state, models, workdir, checkpoints, log, preemption, progress, trace
        )
    if code is not None:
        checkpoint.save(checkpoints, int(state.step), state, saved_beside(run))
    checkpoint.close(checkpoints)
    return code


def loop(run, state, models, workdir, checkpoints, log, preemption, progress, trace) -> tuple:
    """The steps from state.step on; (exit code or None for a roll back, state)."""
    cfg, counter, warm, (frozen, _) = run.cfg, processes.CompileCounter(), None, models
    first, validated = int(state.step), False
    history = run_log.read_metrics(workdir / run_log.METRICS_FILE)
    history = [row for row in history if row['step'] < first]  # other processes have not cut it yet
    for step in range(first, cfg.steps + 1):
        began, row, before = time.monotonic(), {}, counter.count
        if step in (0, cfg.steps) or (cfg.eval.every and step % cfg.eval.every == 0):
            with counter:
                row |= measure(run, policy_of(state.params, frozen.model))
            if warm is not None and not validated:  # a resumed run validates late at first
                warm += counter.count - before
            validated = True
        if step < cfg.steps:
            state = next_iteration(run, state, step, workdir)
        with counter, trace.step(step):
            if step < cfg.steps:
                state, measured, seen = train_step(run, state, *models, step, step == first)
                row |= jax.device_get(measured)
        if warm is None and step - first + 1 == WARM_UP_STEPS:
            warm = counter.count
        row['time/step_s'] = time.monotonic() - began
        row['perf/recompiles'] = 0 if warm is None else counter.count - warm
        if step < cfg.steps:
            row['time/update_s'] = row['time/step_s'] - row['time/collect_s']
            row['perf/tokens_per_s'] = row.pop('rollout/sampled') / row['time/step_s']
        history.append(run_log.plain_row(step, row))
        alarms = roll_back.watch(history, cfg.alarm, used=run.roll_backs)
        log.write(step, history[-1])
        if step == cfg.steps:
            break
        progress.advance(1, **shown(history[-1], history))
        if page_due(cfg, step):
            save_page(run, workdir, step, policy_of(state.params, frozen.model), seen)
        # Before anything is saved: a run that is killed here and resumed comes here again.
        action = roll_back.react(
            alarms, cfg.alarm, step, workdir, checkpoints, used=run.roll_backs, say=progress.say
        )
        if action:
            return (1 if action == 'stop' else None), state
        if preemption.agreed():
            progress.say(f'asked to stop: step {step + 1} is being saved')
            return processes.EXIT_PREEMPTED, state
        if (step + 1) % cfg.checkpoint.every == 0:
            checkpoint.save(checkpoints, step + 1, state, saved_beside(run))
        if problem := filtering.starved(history, cfg.filter.max_empty):
            progress.say(f'step {step}: {problem}')
            return 1, state
    return 0, state


def page_due(cfg: Any, step: int) -> bool:
    every = cfg.log.rollouts_every
    return step == cfg.steps - 1 or bool(every and step % every == 0)


def last_traced(cfg: Any, first: int) -> int:
    """The last step of the trace of a run that starts at `first`; its own last step at the most."""
    return min(first + WARM_UP_STEPS + cfg.log.profile_steps, cfg.steps) - 1


def shown(row: dict, history: list[dict]) -> dict[str, float]:
    """What the progress bar says."""
    evaluated = [r['eval/success'] for r in history if 'eval/success' in r]
    return {
        'success': row['rollout/success'],
        'held-out': evaluated[-1] if evaluated else float('nan'),
        'return': row['rollout/return'],
        'entropy': row['policy/entropy'],
    }


def space_needed(run: Run) -> int:
    """Bytes of the checkpoints that are on disk at once."""
    state = jax.eval_shape(functools.partial(start_state, run), run.params)
    refers = parts.needs_reference(run.cfg) or parts.explores(run.cfg)
    once = run.params if run.cfg.lora.rank or refers else {}
    keep = run.cfg.checkpoint.keep + 1
    return checkpoint.state_bytes(state) * keep + checkpoint.state_bytes(once)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax reports every stage of every save
    try:
        code = train(flags.FLAGS.config, flags.FLAGS.workdir)
    except (ValueError, OSError, RuntimeError) as error:
        processes.fail(error)
    sys.exit(code)


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', None, 'Config file, see configs/.')
    flags.DEFINE_string('workdir', None, 'Folder of the run.')
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main)
