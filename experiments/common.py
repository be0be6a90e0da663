"""Shared parts of the experiments: plans of runs and tables, trained by the sweep.

  python -m experiments.ragen_actions --scale=tiny --seeds=5 --jobs=2
  python -m experiments.ragen_actions --scale=seconds
  python -m experiments.ragen_actions --show

An experiment is one folder. Its __main__.py has the question as docstring, a function per scale
that returns a Plan, and `common.main(__file__, __doc__, SCALES)`. --show rebuilds and prints its
tables from the committed runs. Otherwise the command writes the runs to <workdir>/sweep.py, hands
them to agentrl_jax.sweep (the same command resumes) and prints the tables, which are also written
to <workdir>/tables. --scale=seconds trains all arms of the tiny scale with one seed for a few small
steps: it checks that the tables can be made here. Other arguments go to the sweep: --launcher,
--gpus, --only, --retries, and --config.field=value, which applies to all runs and overrides the
experiment's own value.
"""

import argparse
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
# Fields that the scale of seconds overrides in all runs of the tiny scale
SMALL = {
    'model.num_layers': 1,
    'env.eval_levels': 16,
    'eval.every': 1,
    'log.rollouts_every': 0,
}
# Fields in which arms may differ: their values become multiples of these, in order
LEAST = {'steps': 2, 'clone.steps': 2, 'clone.episodes': 64, 'env.train_levels': 128}
# Halves XLA's compile time; the figures of runs this short are meaningless anyway
QUICK_TO_COMPILE = '--xla_backend_optimization_level=0'
FIELD = '--config.'
MODEL = 'model.path'  # the only field that experiments leave to the command line


class Plan(NamedTuple):
    """Cells and tables of an experiment at one scale; every cell trains with every seed."""

    config: str  # file of the base config of all runs
    cells: tuple[Overrides, ...]  # dotted fields, as in a sweep
    # By name, as in a table.json; with the seeds of the command unless a table sets its own
    tables: Mapping[str, Mapping[str, Any]]


Scales = Mapping[str, Callable[[], Plan]]


def load_config(path: str) -> Any:
    """Return the config of configs/<name>.py."""
    return importlib.import_module(path.removesuffix('.py').replace('/', '.')).get_config()


def difference(base: str, other: str) -> Overrides:
    """Return the overrides that turn config file `base` into config file `other`."""
    start, goal = (tables_runs.flatten(load_config(path).to_dict()) for path in (base, other))
    return {name: value for name, value in goal.items() if value != start[name]}


def cross(*factors: Iterable[Overrides]) -> tuple[Overrides, ...]:
    """Return every combination of the factors' overrides; the last factor changes fastest."""
    return tuple(sweep_spec.Hyper.product([list(factor) for factor in factors]))


def labels(config: str, cells: Mapping[str, Overrides], rows: Sequence[str]) -> dict[str, str]:
    """Return {label of the row in a table: name of the cell}."""
    base, names = load_config(config), {}
    for name, overrides in cells.items():
        names[_text(_fields(base, overrides), rows)] = name
    if len(names) < len(cells):
        raise ValueError(f'some of the cells {", ".join(cells)} have the same {", ".join(rows)}')
    return names


def _fields(base: Any, overrides: Overrides) -> dict[str, Any]:
    """Return the fields of a run that take effect, by their dotted names."""
    cfg, _ = sweep_spec.resolve(base, overrides, 'the plan')
    return tables_runs.flatten(effective(cfg).to_dict())


def make_plan(scales: Scales, scale: str) -> Plan:
    """Return the plan of a scale; SECONDS is derived from the tiny scale."""
    return of_seconds(scales[TINY]()) if scale == SECONDS else scales[scale]()


def of_seconds(plan: Plan) -> Plan:
    """Shrink a plan to a few small steps, to check that its tables can be made."""
    base = load_config(plan.config)
    before = [_fields(base, cell) for cell in plan.cells]
    cells = []
    for cell, fields in zip(plan.cells, before, strict=True):
        least = {}
        for name, value in LEAST.items():
            values = sorted({0} | {other[name] for other in before})
            least[name] = value * values.index(fields[name])
        cells.append({**cell, **SMALL, **least})
    pairs = [(old, _fields(base, cell)) for old, cell in zip(before, cells, strict=True)]

    def renamed(*axes):
        """Map old labels of rows or columns to new ones; axes: the fields of each axis."""
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
    """Return the label of a row or column for a run with these fields."""
    values = [fields[name] for name in names]
    return ', '.join(show(list(x) if isinstance(x, tuple) else x) for x in values)


def list_runs(plan: Plan, seeds: Sequence[int], taken: Iterable[str] = ()) -> list[Overrides]:
    """Return the overrides of all runs, cell by cell.

    taken: fields that the command line sets for all runs; runs do not set them.
    """
    taken = set(taken)
    cells = [{name: x for name, x in cell.items() if name not in taken} for cell in plan.cells]
    for number, cell in enumerate(cells):
        if (first := cells.index(cell)) < number:
            arms = plan.cells[first].items() ^ plan.cells[number].items()
            names = ', '.join(f'{FIELD}{name}' for name in sorted({name for name, _ in arms}))
            raise ValueError(
                f'{names} makes arms {first + 1} and {number + 1} the same run: nothing else '
                'differs; omit it'
            )
    return [{'seed': seed} | cell for cell in cells for seed in seeds]


def sweep_file(runs: Sequence[Overrides], command: str) -> str:
    """Return the source of a file for agentrl_jax.sweep that lists these runs."""
    listed = pprint.pformat(list(runs), width=96, sort_dicts=False)
    return (
        f'"""Written by {command}."""\n\nRUNS = {listed}\n\n\n'
        'def sweep(add):\n    for overrides in RUNS:\n        add(overrides)\n'
    )


def overridden_fields(words: Sequence[str]) -> set[str]:
    """Return the config fields that a command line sets."""
    return {word.removeprefix(FIELD).split('=')[0] for word in words if word.startswith(FIELD)}


def config_of(words: Sequence[str]) -> Any:
    """Return the base config of a sweep command: --config with each --config.field=value."""
    values, argv = flags.FlagValues(), ['sweep', *words]
    values.set_gnu_getopt()  # allow unknown arguments in between
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
    values(argv, known_only=True)
    return values.config


def run_names(listed: Sequence[Overrides], words: Sequence[str], workdir: Path) -> set[str]:
    """Return the names of the run folders that a sweep with these arguments trains."""
    runs = sweep_spec.expand(config_of(words), listed, source='the plan')
    return {run.name for run in under_existing_names(runs, workdir)}


def load_runs(
    plan: Plan, seeds: int, workdir: Path, names: Container[str]
) -> tuple[list[tables_runs.Run], dict[str, dict[str, Any]]]:
    """Return the runs with these names, and the plan's tables as in a table.json.

    The workdir may contain other runs, such as tuning runs or runs with other --config fields.
    seeds: runs per cell. Signals that no run has measured yet are left out.
    """
    specs = {name: {'seeds': seeds} | dict(fields) for name, fields in plan.tables.items()}
    metrics = [name for fields in specs.values() for name in metrics_of(make_spec(fields))]
    runs = [run for run in tables_runs.load([workdir], metrics) if run.name in names]
    measured = {metric for run in runs for row in run.rows for metric in row}
    for fields in specs.values():
        if 'signals' in fields:
            signals = split_names(fields['signals'])
            fields['signals'] = ','.join(name for name in signals if name in measured)
    return runs, specs


def make_tables(runs: Sequence[tables_runs.Run], specs: Mapping[str, Any], folder: Path) -> None:
    """Print the tables of runs and write them to a folder."""
    for name, fields in specs.items():
        spec = make_spec(fields)
        table = build(runs, spec, tables.clones(spec, FOLDER))
        tables.write(table, folder / name)
        print(f'\n{name}\n\n{render.markdown(table)}', end='')


def publish(
    runs: Sequence[tables_runs.Run], specs: Mapping[str, Any], folder: Path, page: str
) -> None:
    """Write the compact metrics, tables and initial README of an experiment to a folder.

    page: README to write if the folder has none; the tables go between its marks. `make tables`
    rebuilds the tables from these files.
    """
    tables_runs.compact(runs, folder)
    text = json.dumps(specs, indent=2, ensure_ascii=False) + '\n'
    files.write_atomic(folder / tables.SPEC_FILE, text)
    if not (folder / 'README.md').exists():
        files.write_atomic(folder / 'README.md', page)
    tables.rebuild(folder)


def first_page(doc: str, command: str, names: Iterable[str]) -> str:
    """Return a README with the question, the command, and the marks around each table."""
    blocks = [
        f'![Learning curves]({name}/curves_step.png)\n\n'
        f'<!-- table {name} -->\n<!-- end of table -->\n'
        for name in names
    ]
    return '\n'.join([f'# {doc.strip()}\n', f'```sh\n{command}\n```\n', *blocks])


def wait_for(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its exit code; forward SIGTERM and SIGINT so that runs are saved."""
    child = subprocess.Popen(words, env=environment)
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda n, _: child.send_signal(n)) for number in numbers]
    try:
        return child.wait()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def folder_of(name: str, scale: str) -> Path:
    """Return the folder of an experiment's results, the tiny scale's next to its __main__.py."""
    return FOLDER / (name if scale == TINY else f'{name}_{scale}')


def arguments(
    name: str, doc: str, scales: Scales, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse argv and create the workdir; return the arguments and those for the sweep."""
    parser = argparse.ArgumentParser(
        prog=f'python -m experiments.{name}',
        description=doc,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='Other arguments go to agentrl_jax.sweep, including --config.field=value.',
    )
    add = parser.add_argument
    add('--scale', choices=[*scales, *([SECONDS] if TINY in scales else [])])
    add('--seeds', type=int, help=f'runs per cell; default: 5, or 1 for {SECONDS}')
    add('--first_seed', type=int, default=0, help='use 100 for tuning; tables use 0, 1, ...')
    add('--jobs', type=int, default=1, help='number of concurrent runs')
    add('--workdir', default='', help=f'default: runs/{name}/<scale>')
    add('--launcher', default='local', choices=['local', 'print', 'slurm'])
    add('--publish', action='store_true', help='write the runs and tables to experiments/')
    add('--show', action='store_true', help='rebuild and print the tables of the committed runs')
    args, rest = parser.parse_known_args(argv)
    if args.show:
        return args, rest
    if not args.scale:
        parser.error('--scale or --show is required')
    small = args.scale in (TINY, SECONDS)
    if args.seeds is None:
        args.seeds = 1 if args.scale == SECONDS else 5
    if args.seeds < 1:
        parser.error(f'--seeds={args.seeds} must be at least 1')
    if args.publish and args.scale == SECONDS:
        parser.error(f'--publish needs results, which --scale={SECONDS} does not produce')
    if args.publish and args.first_seed:
        parser.error('--publish needs --first_seed=0; other seeds are for tuning')
    if not small and MODEL not in overridden_fields(rest):
        parser.error(f'--scale={args.scale} needs --config.{MODEL}=<folder or .gguf>')
    others = sorted(overridden_fields(rest) - {MODEL})
    folder = folder_of(name, args.scale)
    if args.publish and others and (folder / tables_runs.COMPACT_FILE).exists():
        parser.error(
            f'--publish would replace the runs in experiments/{folder.name} with runs that set '
            f'{", ".join(others)}; omit one of the two'
        )
    try:
        args.workdir = files.local_path(args.workdir or f'runs/{name}/{args.scale}')
        files.check_workdir(args.workdir)
    except (ValueError, OSError) as error:
        parser.error(files.format_error(error))
    return args, rest


def main(file: str, doc: str, scales: Scales, argv: Sequence[str] | None = None) -> int:
    """Train the missing runs, print the tables and return the sweep's exit code."""
    name = Path(file).parent.name
    args, rest = arguments(name, doc, scales, argv)
    if args.show:
        tables.rebuild(FOLDER / name)
        for table in tables.experiment(FOLDER / name).values():
            print(render.markdown(table))
        return 0
    plan = make_plan(scales, args.scale)
    workdir = args.workdir
    command = f'python -m experiments.{name} --scale={args.scale} --seeds={args.seeds}'
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    try:
        listed = list_runs(plan, seeds, overridden_fields(rest))
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
        runs, specs = load_runs(plan, args.seeds, workdir, names)
        make_tables(runs, specs, workdir / 'tables')
        if args.publish:
            full_command = shlex.join([*command.split(), *run_log.redact_argv(rest)])
            page = first_page(doc, full_command, specs)
            publish(runs, specs, folder_of(name, args.scale), page)
    except (ValueError, OSError) as error:
        print(f'error: {files.format_error(error)}', file=sys.stderr)
        return 1
    return code
