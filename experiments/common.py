"""Shared parts of the experiments: plans of runs and tables, trained by the sweep.

  python -m experiments.ragen_actions --scale=tiny --seeds=5 --jobs=2
  python -m experiments.ragen_actions --scale=seconds

An experiment is one file: its question as docstring, a function per scale that returns a Plan, and
`common.main(__file__, __doc__, SCALES)`. The command writes the runs to <workdir>/sweep.py, hands
them to agentrl_jax.sweep (the same command resumes) and prints the tables, which are also written
to <workdir>/tables. --scale=seconds trains all arms of the tiny scale with one seed for a few small
steps: it checks that the tables can be made here. Other arguments go to the sweep: --launcher,
--gpus, --only, --retries, and --config.field=value, which applies to all runs and overrides the
experiment's own value.
"""

import argparse
import dataclasses
import importlib
import json
import os
import pprint
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from agentrl_jax import tables
from agentrl_jax.machine import files
from agentrl_jax.records import run_log
from agentrl_jax.results import render
from agentrl_jax.results import runs as tables_runs
from agentrl_jax.results.cells import build
from agentrl_jax.results.spec import make_spec, metrics_of, show, split_names
from agentrl_jax.run.config import effective
from agentrl_jax.run.usage import EXIT_USAGE
from agentrl_jax.sweeps import spec as sweep_spec
from agentrl_jax.sweeps.status import Overrides, under_existing_names

FOLDER = Path(__file__).parent
TINY, SECONDS = 'tiny', 'seconds'
# Fields that the scale of seconds sets in all runs of the tiny scale
SMALL = {
    'model.num_layers': 1,
    'env.eval_levels': 16,
    'eval.every': 1,
    'log.rollouts_every': 0,
}
# ... and of fields in which arms may differ: their values become multiples of these, in order
LEAST = {'steps': 2, 'clone.steps': 2, 'clone.episodes': 64, 'env.train_levels': 128}
# XLA compiles in half the time; the figures of such short runs mean nothing anyway
QUICK_TO_COMPILE = '--xla_backend_optimization_level=0'
FIELD = '--config.'
MODEL = 'model.path'  # the one field that has no value of an experiment's own


class Plan(NamedTuple):
    """An experiment at one scale: every cell is trained with every seed."""

    config: str  # file of the config that all runs start from
    cells: tuple[Overrides, ...]  # dotted fields, as in a sweep
    tables: Mapping[str, Mapping[str, Any]]  # by name, as in a table.json; of as many seeds as the
    # command has unless a table says otherwise


Scales = Mapping[str, Callable[[], Plan]]


def load_config(path: str) -> Any:
    """The config of configs/<name>.py."""
    return importlib.import_module(path.removesuffix('.py').replace('/', '.')).get_config()


def difference(base: str, other: str) -> Overrides:
    """The overrides that make config file `base` equal to config file `other`."""
    start, goal = (tables_runs.flatten(load_config(path).to_dict()) for path in (base, other))
    return {name: value for name, value in goal.items() if value != start[name]}


def cross(*factors: Iterable[Overrides]) -> tuple[Overrides, ...]:
    """Every combination of the factors' overrides; the last factor changes fastest."""
    return tuple(sweep_spec.Hyper.product([list(factor) for factor in factors]))


def labels(config: str, cells: Mapping[str, Overrides], rows: Sequence[str]) -> dict[str, str]:
    """{what a table would call the row: the name of the cell}."""
    base, found = load_config(config), {}
    for name, overrides in cells.items():
        cfg, _ = sweep_spec.resolve(base, overrides, name)
        fields = tables_runs.flatten(effective(cfg).to_dict())
        found[_text(fields, rows)] = name
    if len(found) < len(cells):
        raise ValueError(f'{", ".join(rows)} do not tell {", ".join(cells)} apart')
    return found


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def make_plan(scales: Scales, scale: str) -> Plan:
    """The plan of a scale; SECONDS is derived from the tiny scale."""
    return of_seconds(scales[TINY]()) if scale == SECONDS else scales[scale]()


def of_seconds(plan: Plan) -> Plan:
    """The arms and tables of a plan with a few small steps, to check that a table can be made."""
    base = load_config(plan.config)

    def fields_of(cell):
        cfg, _ = sweep_spec.resolve(base, cell, 'the plan')
        return tables_runs.flatten(effective(cfg).to_dict())

    before = [fields_of(cell) for cell in plan.cells]
    cells = []
    for cell, fields in zip(plan.cells, before, strict=True):
        least = {}
        for name, value in LEAST.items():
            values = sorted({0} | {other[name] for other in before})
            least[name] = value * values.index(fields[name])
        cells.append({**cell, **SMALL, **least})
    pairs = list(zip(before, map(fields_of, cells), strict=True))

    def renamed(*axes):
        """Map the labels of rows or columns to the new labels; axes: the fields of each axis."""
        return {_text(old, names): _text(new, names) for names in axes for old, new in pairs}

    new_tables = {}
    for name, spec in plan.tables.items():
        table = {key: value for key, value in spec.items() if key != 'seeds'}
        if 'labels' in table:
            axes = [split_names(table[axis]) for axis in ('rows', 'cols') if axis in table]
            new = renamed(*axes)
            table['labels'] = {new.get(key, key): label for key, label in table['labels'].items()}
        if 'where' in table:
            new = {field: renamed([field]) for field in table['where']}
            table['where'] = {
                field: '|'.join(new[field].get(x, x) for x in split_names(values, '|'))
                for field, values in table['where'].items()
            }
        new_tables[name] = table
    return Plan(plan.config, tuple(cells), new_tables)


def _text(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    """The label of the row or column of a run with these fields."""
    return ', '.join(show(_as_json(fields[name])) for name in names)


def list_runs(plan: Plan, seeds: Sequence[int], taken: Iterable[str] = ()) -> list[Overrides]:
    """The overrides of all runs, all seeds of the first cell first.

    taken: fields that the command line sets for all runs, and that no run sets for itself.
    """
    taken = set(taken)
    cells = [{name: x for name, x in cell.items() if name not in taken} for cell in plan.cells]
    for number, cell in enumerate(cells):
        if (first := cells.index(cell)) < number:
            arms = plan.cells[first].items() ^ plan.cells[number].items()
            names = ', '.join(f'{FIELD}{name}' for name in sorted({name for name, _ in arms}))
            raise ValueError(
                f'{names} makes arms {first + 1} and {number + 1} the same run: they differ in '
                'nothing else; leave it out'
            )
    return [{'seed': seed} | cell for cell in cells for seed in seeds]


def sweep_file(runs: Sequence[Overrides], command: str) -> str:
    """A file for agentrl_jax.sweep that lists these runs."""
    listed = pprint.pformat(list(runs), width=96, sort_dicts=False)
    return (
        f'"""Written by {command}."""\n\nRUNS = {listed}\n\n\n'
        'def sweep(add):\n    for overrides in RUNS:\n        add(overrides)\n'
    )


def given_fields(words: Sequence[str]) -> set[str]:
    """The config fields that a command line sets."""
    return {word.removeprefix(FIELD).split('=')[0] for word in words if word.startswith(FIELD)}


def config_of(words: Sequence[str]) -> Any:
    """The config that a sweep with these words starts from: --config and --config.field=value."""
    values, argv = flags.FlagValues(), ['sweep', *words]
    values.set_gnu_getopt()  # words that it does not know may lie between
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
    values(argv, known_only=True)
    return values.config


def run_names(listed: Sequence[Overrides], words: Sequence[str], workdir: Path) -> set[str]:
    """The folders in `workdir` of the runs that a sweep with these words trains."""
    runs = sweep_spec.expand(config_of(words), listed, source='the plan')
    return {run.name for run in under_existing_names(runs, workdir)}


def load_runs(
    workdir: Path,
    seeds: Sequence[int],
    metrics: Iterable[str],
    names: Container[str] | None = None,
) -> list[tables_runs.Run]:
    """The runs of these seeds, and of these names where any are given.

    Others may be in the same workdir: those for tuning, or with other --config fields.
    """
    return [
        run
        for run in tables_runs.load([workdir], metrics)
        if run.fields['seed'] in seeds and (names is None or run.name in names)
    ]


def make_tables(
    plan: Plan, seeds: Sequence[int], workdir: Path, names: Container[str] | None = None
) -> None:
    """Prints the tables of the runs as they stand and writes them to <workdir>/tables.

    names: of the only runs that count. Signals that no run has measured yet are left out.
    """
    for name, given in plan.tables.items():
        spec = make_spec({'seeds': len(seeds)} | given)
        runs = load_runs(workdir, seeds, metrics_of(spec), names)
        spec = dataclasses.replace(spec, signals=measured(spec.signals, runs))
        table = build(runs, spec, tables.clones(spec, FOLDER))
        tables.write(table, workdir / 'tables' / name)
        print(f'\n{name}\n\n{render.markdown(table)}', end='')


def measured(signals: Iterable[str], runs: Iterable[tables_runs.Run]) -> tuple[str, ...]:
    """Those of the signals that any of the runs has measured."""
    found = {metric for run in runs for row in run.rows for metric in row}
    return tuple(metric for metric in signals if metric in found)


def publish(
    plan: Plan,
    seeds: int,
    workdir: Path,
    folder: Path,
    page: str,
    names: Container[str] | None = None,
) -> None:
    """Keeps the compact metrics, the tables and the first README of an experiment in a folder.

    seeds: how many, from 0 on. page: the README, if there is none yet; the tables go between its
    marks. `make tables` makes them again from what is kept. names: of the only runs to keep.
    Signals that no run has measured yet are left out.
    """
    specs = {name: {'seeds': seeds} | dict(given) for name, given in plan.tables.items()}
    metrics = [name for given in specs.values() for name in metrics_of(make_spec(given))]
    runs = load_runs(workdir, range(seeds), metrics, names)
    for given in specs.values():
        if 'signals' in given:
            given['signals'] = ','.join(measured(make_spec(given).signals, runs))
    tables_runs.compact(runs, folder / tables.METRICS_FOLDER)
    text = json.dumps(specs, indent=2, ensure_ascii=False) + '\n'
    files.write_atomic(folder / tables.SPEC_FILE, text)
    if not (folder / 'README.md').exists():
        files.write_atomic(folder / 'README.md', page)
    tables.rebuild(folder)


def first_page(doc: str, command: str, names: Iterable[str]) -> str:
    """A README with the question, the command, and the marks between which tables are written."""
    blocks = [f'<!-- table {name} -->\n<!-- end of table -->\n' for name in names]
    return '\n'.join([f'# {doc.strip()}\n', f'```sh\n{command}\n```\n', *blocks])


def wait_for(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of a command; signals to end are passed on, since the sweep saves its runs."""
    child = subprocess.Popen(words, env=environment)
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda n, _: child.send_signal(n)) for number in numbers]
    try:
        return child.wait()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def arguments(
    name: str, doc: str, scales: Scales, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """What is said of the experiment, whose workdir is made, and the words for the sweep."""
    parser = argparse.ArgumentParser(
        prog=f'python -m experiments.{name}',
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Other arguments go to agentrl_jax.sweep, --config.field=value among them.',
    )
    add = parser.add_argument
    add('--scale', required=True, choices=[*scales, *([SECONDS] if TINY in scales else [])])
    add('--seeds', type=int, help=f'runs of a cell; default: 5, or 1 of {SECONDS}')
    add('--first_seed', type=int, default=0, help='100 for tuning: tables use 0, 1, ...')
    add('--jobs', type=int, default=1, help='runs that train at once')
    add('--workdir', default='', help=f'default: runs/{name}/<scale>')
    add('--launcher', default='local', choices=['local', 'print', 'slurm'])
    add('--publish', action='store_true', help=f'write experiments/{name}_<scale> as well')
    args, rest = parser.parse_known_args(argv)
    small = args.scale in (TINY, SECONDS)
    if args.seeds is None:
        args.seeds = 1 if args.scale == SECONDS else 5
    if args.seeds < 1:
        parser.error(f'--seeds={args.seeds} must be at least 1')
    if args.publish and args.scale == SECONDS:
        parser.error(f'--publish is for results: --scale={SECONDS} has none')
    if args.publish and args.first_seed:
        parser.error('--publish is for seeds 0, 1, ...: others are for tuning')
    if not small and MODEL not in given_fields(rest):
        parser.error(f'--scale={args.scale} needs --config.{MODEL}=<folder or .gguf>')
    folder, others = FOLDER / f'{name}_{args.scale}', sorted(given_fields(rest) - {MODEL})
    if args.publish and others and (folder / tables.METRICS_FOLDER).exists():
        parser.error(
            f'--publish would replace the runs in experiments/{folder.name} by others with '
            f'{", ".join(others)} set: leave one of them out'
        )
    try:
        args.workdir = files.local_path(args.workdir or f'runs/{name}/{args.scale}')
        files.check_workdir(args.workdir)
    except (ValueError, OSError) as error:
        parser.error(files.in_words(error))
    return args, rest


def main(file: str, doc: str, scales: Scales, argv: Sequence[str] | None = None) -> int:
    """Trains what is not trained yet and shows the tables; the sweep's exit code."""
    name = Path(file).stem
    args, rest = arguments(name, doc, scales, argv)
    plan = make_plan(scales, args.scale)
    workdir = args.workdir
    command = f'python -m experiments.{name} --scale={args.scale} --seeds={args.seeds}'
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    try:
        listed = list_runs(plan, seeds, given_fields(rest))
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return EXIT_USAGE
    path = workdir / 'sweep.py'
    files.write_atomic(path, sweep_file(listed, command))
    words = [
        sys.executable,
        '-m',
        'agentrl_jax.sweep',
        f'--config={plan.config}',
        f'--sweep={path}',
        f'--workdir={workdir}',
        f'--jobs={args.jobs}',
        f'--launcher={args.launcher}',
        *rest,
    ]
    environment = dict(os.environ)
    if args.scale == SECONDS:
        environment['XLA_FLAGS'] = f'{QUICK_TO_COMPILE} {environment.get("XLA_FLAGS", "")}'
    code = wait_for(words, environment)
    if args.launcher != 'local' or code not in (0, 1) or not any(workdir.glob('*/run.json')):
        return code
    try:
        names = run_names(listed, words[3:], workdir)
        make_tables(plan, seeds, workdir, names)
        if args.publish:
            whole = shlex.join([*command.split(), *run_log.redact_argv(rest)])
            page = first_page(doc, whole, plan.tables)
            publish(plan, args.seeds, workdir, FOLDER / f'{name}_{args.scale}', page, names)
    except (ValueError, OSError) as error:
        print(f'error: {files.in_words(error)}', file=sys.stderr)
        return 1
    return code
