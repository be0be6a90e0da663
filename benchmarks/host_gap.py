"""What devices wait for the host in a step of training, with its rows, pages and checkpoints.

  python -m benchmarks.host_gap [--config=FILE] [--config.field=value] [--watched=20] [--json=PATH]

A run of agentrl_jax.train in a folder that is removed, by default of configs/demo.py. Each program
of a step is waited for, as the loop does with all but the smallest; the time in none of them is the
host's: before the update (counters looked at, arguments made) and between steps (figures fetched,
row, alarms, now and then a page and a checkpoint). The reference is the time in programs of the
same steps. The first two steps compile and do not count, nor do validations.
"""

import contextlib
import dataclasses
import io
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from agentrl_jax import train
from agentrl_jax.run.build import Run, build
from benchmarks import common

CONFIG = pathlib.Path(__file__).resolve().parent.parent / 'configs' / 'demo.py'
PROGRAMS = ('draw', 'collect', 'metrics', 'information', 'learn', 'rescore')
WARM_UP = 2  # steps


class Span(NamedTuple):
    """A program of a step: when the host called it and when the device was done."""

    name: str
    called: float  # by common.clock
    done: float


def watched(run: Run, spans: list[Span]) -> Run:
    """The run whose programs note when they work."""

    def noting(name: str, call: Callable) -> Callable:
        def noted(*arguments):
            called = common.clock()
            out = jax.block_until_ready(call(*arguments))
            spans.append(Span(name, called, common.clock()))
            return out

        return noted

    programs = {name: noting(name, getattr(run.training, name)) for name in PROGRAMS}
    return dataclasses.replace(run, training=dataclasses.replace(run.training, **programs))


def steps_of(spans: list[Span]) -> list[dict[str, float]]:
    """Seconds of each step but the last, from its first program to that of the next step.

    device: programs; before_update: gaps up to the update; between_steps: gaps after it.
    """
    begins = [i for i, span in enumerate(spans) if span.name == 'draw']
    found = []
    for first, after in zip(begins, begins[1:], strict=False):
        step = dict(device=0.0, before_update=0.0, between_steps=0.0)
        where = 'before_update'
        for span, following in zip(spans[first:after], spans[first + 1 : after + 1], strict=True):
            step['device'] += span.done - span.called
            where = 'between_steps' if span.name == 'learn' else where
            step[where] += following.called - span.done
        found.append(step)
    return found


def run(cfg: Any, *, watched_steps: int) -> dict[str, Any]:
    """All measurements, as the dictionary that is printed."""
    spans: list[Span] = []
    cfg.steps = WARM_UP + watched_steps + 1
    cfg.eval.every = 0  # a validation is the device's
    with (
        tempfile.TemporaryDirectory() as workdir,
        mock.patch.object(train, 'build', lambda given: watched(build(given), spans)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = train.train(cfg, workdir)
    if code:
        raise ValueError(f'the run ended with exit code {code}')
    steps = steps_of(spans)[WARM_UP:]
    means = {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}
    usual = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    host = [step['before_update'] + step['between_steps'] for step in steps]
    return {
        'algorithm': cfg.algorithm,
        'steps': len(steps),
        'median_s': usual,
        'mean_s': means,
        'longest_gap_s': max(step['between_steps'] for step in steps),
        'host_over_device': statistics.fmean(host) / means['device'],
    }


def show(result: dict[str, Any]) -> str:
    names = ('device', 'before_update', 'between_steps')
    rows = [
        [name.replace('_', ' '), 1e3 * result['median_s'][name], 1e3 * result['mean_s'][name]]
        for name in names
    ]
    title = f'{result["algorithm"]}, {result["steps"]} steps'
    facts = [
        ['longest gap between steps, ms', 1e3 * result['longest_gap_s']],
        ['host / device', result['host_over_device']],
    ]
    return '\n\n'.join(
        [
            common.table(title, ['of a step', 'median, ms', 'mean, ms'], rows),
            common.table('', ['what', ''], facts),
        ]
    )


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    given = flags.FLAGS
    common.pin(given.core)
    try:
        result = run(given.config, watched_steps=given.watched)
    except ValueError as error:
        sys.exit(f'error: {error}')
    print(show(result))
    common.emit('host_gap', result, pathlib.Path(given.json) if given.json else None)


if __name__ == '__main__':
    config_flags.DEFINE_config_file('config', str(CONFIG), 'Config file, see configs/.')
    flags.DEFINE_integer('watched', 20, 'Steps that count.')
    flags.DEFINE_integer('core', 0, 'CPU core to stay on; -1: any.')
    flags.DEFINE_string('json', '', 'Also write the result to this file.')
    app.run(main)
