"""Tables and learning curves of many runs, with intervals, random play and the oracle.

  python -m agentrl_jax.tables runs/sweep --rows=method --cols=env.name --out=runs/sweep/table
  python -m agentrl_jax.tables --compact runs/sweep experiments/demo_cloned/metrics
  python -m agentrl_jax.tables --rebuild experiments
  python -m agentrl_jax.tables --rebuild experiments/demonstrations_tiny

The first prints Markdown and writes table.md, table.tex, table.csv, runs.csv, the curves and, with
a baseline, a forest plot of the differences. The second keeps what tables need of every run, small
enough to be committed; tables come out of that folder with the same numbers. The third makes every
table that an experiment's table.json describes ({"<name>": {"rows": "algorithm", ...}}, keys as the
fields of results.spec.Spec) from its metrics/, into a folder of that name, and writes it between
<!-- table <name> --> and <!-- end of table --> wherever the experiment's README.md has these lines.
The fourth does so for one experiment.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue

from agentrl_jax.machine import files
from agentrl_jax.records import plots
from agentrl_jax.results import curves, forest, render
from agentrl_jax.results.cells import Table, build
from agentrl_jax.results.runs import COMMON_FILE, Run, compact, load, read_as
from agentrl_jax.results.spec import (
    COUNT,
    LAST,
    LEAVE_OUT,
    PLACES,
    Spec,
    make_spec,
    metrics_of,
    split_names,
)
from agentrl_jax.run import command, usage

SPEC_FILE, METRICS_FOLDER = 'table.json', 'metrics'
PAGE_ENDINGS = ('png',)  # of curves of experiments: what their READMEs show
STEMS = ('curves_*', 'signals*', forest.STEM)
FIGURES = tuple(f'{stem}.{end}' for stem in STEMS for end in plots.ENDINGS)
FOLDER_NAME = r'[A-Za-z0-9_][A-Za-z0-9_.-]*'
FolderName = Annotated[str, Field(pattern=f'^{FOLDER_NAME}$')]
OPTIONS = {  # fields of Spec that are flags
    'rows': 'fields that name a row: algorithm,filter.keep; or method (StarPO-S)',
    'cols': 'config fields that name a column',
    'metric': f'what the table shows; default: {Spec.metric}',
    'at': f'{", ".join(PLACES)} or a step; default: {LAST}',
    'also': f'more metrics to show; default: {",".join(Spec.also)}',
    'baseline': 'row to compare with',
    'margin': 'differences from the baseline within +- this count as none: 0.05; default: none',
    'where': 'take only runs with field=value or field=value|value; may be given several times',
    'pooled': 'fields that may differ within a cell, as the seed may',
    'unfinished': f'runs that did not get there: {LEAVE_OUT} (the default) or '
    f'{COUNT} their last one',
    'seeds': 'runs per cell; default: the number of seeds',
    'overall': 'one more column over all columns',
    'signals': 'further metrics to draw over steps',
    'clones': 'folders of expert clones, compared with runs of the same view',
}
BLOCK = '(<!-- table {} -->\n).*?(<!-- end of table -->)'


def write(table: Table, folder: Path, endings: Sequence[str] = plots.ENDINGS) -> list[Path]:
    """Every form of a table as files, figures in these formats; the same runs, the same bytes.

    Figures of these names that belong to the table no more are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        'table.md': render.markdown(table),
        'table.tex': render.latex(table),
        'table.csv': render.csv_text(table),
        'runs.csv': render.runs_csv(table),
    }
    for name, text in texts.items():
        files.write_atomic(folder / name, text)
    drawn = curves.write(table, folder, endings) if table.spec.curves else []
    drawn += forest.write(table, folder, endings)
    before = [path for name in FIGURES for path in folder.glob(name)]
    for path in set(before) - set(drawn):
        path.unlink()
    return [*(folder / name for name in texts), *drawn]


def rebuild(folder: Path) -> list[Path]:
    """Build the tables of an experiment, or of all experiments in a folder, from their metrics.

    Returns the files that were written.
    """
    if (folder / SPEC_FILE).is_file():
        experiments, paths = folder.resolve().parent, [folder / SPEC_FILE]
    else:
        experiments, paths = folder, sorted(folder.glob(f'*/{SPEC_FILE}'))
    if not paths:
        raise FileNotFoundError(
            f'{folder} holds no experiment: neither {SPEC_FILE} nor */{SPEC_FILE} is there'
        )
    written = []
    for path in paths:
        specs = read_as(dict[FolderName, dict[str, JsonValue]], files.read_json(path), path)
        if not specs or METRICS_FOLDER in specs:
            raise ValueError(f'{path}: tables by their names are expected, none {METRICS_FOLDER!r}')
        for name, given in specs.items():
            try:
                spec = make_spec(given)
                runs = load([path.parent / METRICS_FOLDER])
                table = build(runs, spec, clones(spec, experiments))
            except ValueError as error:
                one_line = ' '.join(str(error).split())
                raise ValueError(f'{path}, {name}: {one_line}') from error
            written += write(table, path.parent / name, PAGE_ENDINGS)
            written += _embed(path.parent / 'README.md', name, render.markdown(table))
    return written


def clones(spec: Spec, experiments: Path) -> list[Run]:
    """The committed runs of the experiments whose clones a table shows."""
    folders = [experiments / name / METRICS_FOLDER for name in spec.clones]
    missing = [folder for folder in folders if not (folder / COMMON_FILE).is_file()]
    plain = all(re.fullmatch(FOLDER_NAME, name) for name in spec.clones)
    if not plain or missing or len(set(folders)) < len(folders):
        raise ValueError(f'clones={spec.clones} must be different experiments with {COMMON_FILE}')
    return load(folders) if folders else []


def _embed(readme: Path, name: str, text: str) -> list[Path]:
    """Puts a table between its two marks in a README that has them."""
    old = files.read_text(readme) if readme.exists() else ''
    pattern = re.compile(BLOCK.format(re.escape(name)), re.DOTALL)
    new, count = pattern.subn(lambda match: match[1] + text + match[2], old)
    if count:
        files.write_atomic(readme, new)
    return [readme] * bool(count)


def split_where(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition('=') for text in given]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError('--where needs field=value, or field=value|value')
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f'--where names {" and ".join(names)}: one field once, as field=a|b')
    return {name: values for name, _, values in pairs}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(__doc__, 'agentrl_jax.tables')
    add = parser.add_argument
    add('folders', nargs='+', help='runs, folders of runs, compact folders')
    for name, words in OPTIONS.items():
        default = getattr(Spec, name, '')
        default = ','.join(default) if isinstance(default, tuple) else default
        if name == 'where':
            add('--where', action='append', default=[], help=words)
        elif isinstance(default, bool):
            add(f'--{name}', action='store_true', help=words)
        else:
            add(f'--{name}', type=type(default), default=default, help=words)
    add('--out', default='', help='folder for the files; without it only Markdown is printed')
    add('--compact', action='store_true', help='write the runs compactly to the last folder')
    add('--rebuild', action='store_true', help='make the tables of one experiment, or of all')
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    if args.rebuild:
        for folder in args.folders:
            print(*rebuild(files.local_path(folder)), sep='\n')
    elif args.compact:
        if args.where:
            raise ValueError('--compact keeps all runs of its folders: it takes no --where')
        if len(args.folders) < 2:
            raise ValueError('--compact needs the folders of the runs and, last, its own')
        *sources, folder = args.folders
        more = (args.metric, *split_names(args.also), *split_names(args.signals))
        written = compact(load(sources, more), folder)
        size = sum(path.stat().st_size for path in written)
        print(f'{len(written)} runs, {size / 1000:.0f} kB in {folder}')
    else:
        given = {name: value for name, value in vars(args).items() if name in OPTIONS}
        spec = make_spec(given | {'where': split_where(args.where)})
        runs = load(args.folders, metrics_of(spec))
        table = build(runs, spec, load(spec.clones) if spec.clones else ())
        print(render.markdown(table), end='')
        for path in write(table, files.local_path(args.out)) if args.out else []:
            print(path, file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    try:
        with usage.checked():
            run(args)
    except (OSError, ValueError) as error:
        usage.end(files.in_words(error), error)


if __name__ == '__main__':
    main()
