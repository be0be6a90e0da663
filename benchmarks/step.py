"""One training step by parts: rollout, scores, update and the rest.

  python -m benchmarks.step [--config=FILE] [--config.field=value] [--repeats=3] [--json=PATH]

Works with any training config; weights are random unless model.path is set. The parts are the
programs of a run, timed within its steps, with metrics fetched; "rest" is the remaining time.
Scores and update are one program: scoring is timed separately, the update is the difference. The
host's share is the CPU time of the Python thread. Wanted shares are the useful part of the work:
decoding slots with a token of an episode, and positions read for an episode's prompt.
"""

import dataclasses
import functools
import pathlib
import resource
import statistics
import sys
import time
from typing import Any

import jax
from absl import app, flags, logging
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import config_flags

from agentrl_jax import train
from agentrl_jax.machine import processes
from agentrl_jax.models.functions import on_base
from agentrl_jax.rl import update
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.run import collecting, hooks, parts, streams
from agentrl_jax.run import params as run_params
from agentrl_jax.run.build import build, build_update_settings
from agentrl_jax.run.run import Run
from agentrl_jax.run.state import RunState, extra_arrays, start_state
from agentrl_jax.run.streams import Streams
from agentrl_jax.types import FrozenParams
from benchmarks import common

CONFIG = pathlib.Path(__file__).resolve().parent / 'step_config.py'
PROGRAMS = ('collect', 'learn')
MIB = 2**20


@dataclasses.dataclass
class Session:
    """A run in the middle of training; every update replaces `state`."""

    run: Run
    state: Any
    frozen: FrozenParams
    rollout: Any = None

    @property
    def streams(self) -> Streams:
        return Streams(self.run.config.seed)

    @property
    def policy(self) -> Any:
        return run_params.policy_of(self.state.actor, self.frozen.model)

    def collect_arguments(self) -> tuple:
        run = self.run
        (episodes,) = run.training.draw(self.streams.key(streams.LEVELS), 0, 0)
        return self.policy, run.training.tasks[0], episodes, self.streams.key(streams.COLLECT)

    def learn_arguments(self) -> tuple:
        run = self.run
        shuffle = self.streams.key(streams.SHUFFLE) if run.config.batch.shuffle else None
        return (
            self.state,
            self.frozen,
            self.rollout,
            shuffle,
            None,
        )

    def play(self) -> Any:
        return collecting.play(self.run, self.policy, self.run.training.tasks, 0)

    def step(self) -> Any:
        run_state = RunState(self.state, self.frozen, None)
        self.state, measured, _, _ = train.train_step(
            self.run, run_state, self.state, 0, first=False
        )
        return measured


def open_session(cfg: Any) -> Session:
    """A run at step 0, without a folder."""
    run = build(cfg)
    cfg = run.config
    if cfg.base_rows:
        raise ValueError('this benchmark has no demonstrations; set evol.base_rows=0')
    state = start_state(run, run.params)
    reference = None
    if cfg.algorithm.uses_reference:
        reference = jax.tree.map(jax.numpy.copy, run_params.policy_of(state.params, {}))
    model = run.params if cfg.lora.rank else {}
    return Session(run, state, FrozenParams(model, reference, extra_arrays(run)))


def learning(run: Run) -> UpdateSettings:
    """The settings of the run's update."""
    task = run.training.tasks[0]
    extras = hooks.extras_of(run.additions, task)
    return build_update_settings(run.config, run.mesh, task, extras)


def build_score(session: Session) -> Any:
    """score() -> the result of update.prepare for the session's rollout, starting with a Batch."""
    run = session.run
    fns = on_base(parts.build_functions(run.config, run.model, run.mesh), session.frozen.model)
    program = jax.jit(functools.partial(update.prepare, fns=fns, settings=learning(run)))
    return lambda: program(session.state, session.frozen, session.rollout)


def compile_program(session: Session, name: str) -> dict[str, float]:
    """Compile time and memory of a program on one device."""
    arguments = getattr(session, f'{name}_arguments')()
    start = time.monotonic()
    training = session.run.training
    program = training.collects[0] if name == 'collect' else training.learn
    memory = program.trace(*arguments).lower().compile().memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return {
        'compile_s': time.monotonic() - start,
        'memory_mib': (memory.argument_size_in_bytes + new) / MIB,
    }


def time_steps(session: Session, repeats: int) -> dict[str, float]:
    """Seconds of a step and of its programs, medians over steps; two steps warm up."""
    spent = dict.fromkeys(PROGRAMS, 0.0)

    def watched(name):
        call = getattr(session.run.training, name)

        def timed(*arguments):
            start = common.clock()
            out = jax.block_until_ready(call(*arguments))
            spent[name] += common.clock() - start
            return out

        return timed

    run, rows = session.run, []
    training = dataclasses.replace(run.training, **{name: watched(name) for name in PROGRAMS})
    session.run = dataclasses.replace(run, training=training)
    for _ in range(2 + repeats):
        spent.update(dict.fromkeys(PROGRAMS, 0.0))
        rows.append({'step': common.seconds(session.step)} | spent)
    session.run = run
    return {name: statistics.median(row[name] for row in rows[2:]) for name in rows[0]}


def host_shares(session: Session, repeats: int) -> dict[str, float]:
    """CPU time of the Python thread over the seconds of a rollout and of a step; medians."""
    out = {}
    for name in ('play', 'step'):
        shares = []
        for _ in range(repeats):
            thread, start = time.thread_time(), common.clock()
            jax.block_until_ready(getattr(session, name)())
            shares.append((time.thread_time() - thread) / (common.clock() - start))
        out[name] = statistics.median(shares)
    return out


def useful_shares(session: Session, counters: dict[str, Any]) -> dict[str, float]:
    """Wanted shares of decoding slots and positions read.

    counters: of the session's rollout. "read" is omitted for environments on hosts, and for
    windows, because their blocks are as wide as a window.
    """
    cfg, rows = session.run.config, session.rollout.tokens.shape[0]
    slots, shards = min(cfg.rollout.slots or rows, rows), counters['decodes'].size
    decoded = counters['decodes'].mean() * slots
    shares = {'decoded': float(counters['generated'].sum() / decoded)}
    if 'read' in counters and not cfg.context.window:
        width = session.run.training.tasks[0].width
        block = min(cfg.rollout.serve_rows, slots // shards) * width
        shares['read'] = float(counters['read'].sum() / (counters['reads'].sum() * block))
    return shares


def peak_bytes() -> int:
    """Peak memory of this process, or of its first accelerator."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and 'peak_bytes_in_use' in stats:
        return stats['peak_bytes_in_use']
    unit = 1 if sys.platform == 'darwin' else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def split(times: dict[str, float]) -> dict[str, float]:
    """Seconds of the parts of a step; they add up to it."""
    return {
        'collect': times['collect'],
        'score': times['score'],
        'update': times['learn'] - times['score'],
        'rest': times['step'] - times['collect'] - times['learn'],
    }


def run(cfg: Any, *, repeats: int) -> dict[str, Any]:
    """Return all measurements as a dictionary."""
    session = open_session(cfg)
    with processes.CompileCounter() as counter:
        programs = {'collect': compile_program(session, 'collect')}
        (session.rollout, _), counted = session.play()
        generated = collecting.sampled(counted)
        programs['learn'] = compile_program(session, 'learn')
        session.step()
    times = time_steps(session, repeats)
    times['score'] = common.timed(build_score(session), repeats)
    shares = host_shares(session, repeats)
    session.rollout, counters = jax.device_get(
        session.run.training.collects[0](*session.collect_arguments())
    )
    rows, tokens = session.rollout.tokens.shape[0], int(session.rollout.attention_mask.sum())
    return {
        'algorithm': cfg.algorithm,
        'episodes': rows,
        'turns': int(session.rollout.num_turns.sum()),
        'tokens': tokens,
        'generated': generated,
        'seconds': times,
        'parts': split(times),
        'tokens_per_s': tokens / times['step'],
        'turns_per_s': int(session.rollout.num_turns.sum()) / times['step'],
        'programs': programs,
        'host_share': {'rollout': shares['play'], 'step': shares['step']},
        'wanted': useful_shares(session, counters),
        'compile_s': counter.seconds,
        'peak_mib': peak_bytes() / MIB,
    }


def show(result: dict[str, Any]) -> str:
    total = result['seconds']['step']
    rows = [[name, s, s / total] for name, s in result['parts'].items()]
    title = (
        f'{result["algorithm"]}, {result["episodes"]} episodes, {result["turns"]} turns, '
        f'{result["tokens"]:,} tokens ({result["generated"]:,} sampled)'
    )
    first = common.table(title, ['part', 'seconds', 'share'], [*rows, ['step', total, 1.0]])
    columns = ['program', 'MiB', 'compile s']
    rows = [[name, x['memory_mib'], x['compile_s']] for name, x in result['programs'].items()]
    host = result['host_share']
    facts = [
        ['tokens/s', result['tokens_per_s']],
        ['turns/s', result['turns_per_s']],
        ['host share of the rollout', host['rollout']],
        ['host share of the step', host['step']],
        *([f'{name}: wanted', share] for name, share in result['wanted'].items()),
        ['all compiling, s', result['compile_s']],
        ['peak memory, MiB', result['peak_mib']],
    ]
    return '\n\n'.join(
        [first, common.table('programs', columns, rows), common.table('', ['what', ''], facts)]
    )


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    options = flags.FLAGS
    common.pin(options.core)
    jax.config.update('jax_enable_compilation_cache', False)  # compile times are a result
    compilation_cache.reset_cache()  # imports have already initialised it
    try:
        result = run(options.config, repeats=options.repeats)
    except ValueError as error:
        sys.exit(f'error: {error}')
    print(show(result))
    common.emit('step', result, pathlib.Path(options.json) if options.json else None)


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', str(CONFIG), 'Config file, see configs/.')
    flags.DEFINE_integer('repeats', 3, 'Number of rounds; the result is the median.')
    flags.DEFINE_integer('core', 0, 'CPU core to run on; -1: any.')
    flags.DEFINE_string('json', '', 'Also write the result to this file.')
    app.run(main)
