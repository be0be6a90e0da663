"""Tables and learning curves of many runs, with intervals, random play and the oracle.

  python -m agentrl_jax.tables runs/sweep --rows=method --cols=env.name --out=runs/sweep/table
  python -m agentrl_jax.tables --compact runs/sweep experiments/demo_cloned
  python -m agentrl_jax.tables --rebuild experiments

The first command prints Markdown and writes table.md, table.tex, table.csv, runs.csv, the curves
and, with a baseline, a forest plot of the differences. The second writes runs.jsonl.xz, the part of
the runs that tables need; it is small enough to commit. The third rebuilds the tables and figures
that the READMEs of experiments show, from runs.jsonl.xz and table.json (results/README.md).
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
from agentrl_jax.results.runs import COMPACT_FILE, Run, compact, compact_lines, load
from agentrl_jax.results.spec import (
    LAST,
    PLACES,
    Spec,
    make_spec,
    metrics_of,
    split_names,
)
from agentrl_jax.run import command, usage

SPEC_FILE = 'table.json'
STEMS = ('curves_*', 'signals*', forest.STEM)
FIGURES = tuple(f'{stem}.{end}' for stem in STEMS for end in plots.ENDINGS)
FOLDER_NAME = r'[A-Za-z0-9_][A-Za-z0-9_.-]*'
FolderName = Annotated[str, Field(pattern=f'^{FOLDER_NAME}$')]
Specs = Annotated[dict[FolderName, dict[str, JsonValue]], Field(min_length=1)]  # table.json
OPTIONS = {  # fields of Spec that are flags
    'rows': 'fields that name a row: algorithm,filter.keep; or method (StarPO-S)',
    'cols': 'config fields that name a column',
    'metric': f'what the table shows; default: {Spec.metric}',
    'at': f'one of {", ".join(PLACES)}; default: {LAST}',
    'also': f'more metrics to show; default: {",".join(Spec.also)}',
    'baseline': 'row to compare with',
    'margin': 'differences within plus or minus this are marked as none, such as 0.05',
    'where': 'only runs with field=value or field=value|value; may be repeated',
    'seeds': 'runs per cell; default: the number of seeds',
    'overall': 'one more column over all columns',
    'signals': 'further metrics to draw over steps',
    'clones': 'folders of expert clones, compared with runs of the same view',
}
BLOCK = '(<!-- table {} -->\n).*?(<!-- end of table -->)'


def figures(table: Table) -> dict[str, plots.Draw]:
    """{name without ending: how to draw it}."""
    return curves.figures(table) | forest.figures(table)


def write(table: Table, folder: Path) -> list[Path]:
    """Write a table in every format, with its figures; equal runs give equal bytes.

    Older figures of these names are removed.
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
    drawn = [path for stem, draw in figures(table).items() for path in draw(folder / stem)]
    before = [path for name in FIGURES for path in folder.glob(name)]
    for path in set(before) - set(drawn):
        path.unlink()
    return [*(folder / name for name in texts), *drawn]


def experiment(folder: Path) -> dict[str, Table]:
    """Return the tables of an experiment by name, from table.json and the committed runs."""
    path = folder / SPEC_FILE
    built = {}
    for name, fields in files.read_as(Specs, files.read_json(path), path).items():
        try:
            spec = make_spec(fields)
            built[name] = build(load([folder]), spec, clones(spec, folder.resolve().parent))
        except ValueError as error:
            one_line = ' '.join(str(error).split())
            raise ValueError(f'{path}, {name}: {one_line}') from error
    return built


def rebuild(folder: Path) -> list[Path]:
    """Rebuild what the READMEs of an experiment, or of all experiments in a folder, show.

    Returns the files that were written.
    """
    inside = (
        [folder / SPEC_FILE] if (folder / SPEC_FILE).is_file() else folder.glob(f'*/{SPEC_FILE}')
    )
    folders = sorted(path.parent for path in inside)
    if not folders:
        raise FileNotFoundError(
            f'{folder} holds no experiment: neither {SPEC_FILE} nor */{SPEC_FILE} is there'
        )
    written = []
    for folder in folders:
        page = folder / 'README.md'
        old = text = files.read_text(page) if page.exists() else ''
        for name, table in experiment(folder).items():
            text = _embed(text, name, render.markdown(table))
            shown = {
                stem: draw
                for stem, draw in figures(table).items()
                if f'({name}/{stem}.png)' in text
            }
            for stem, draw in shown.items():
                (folder / name).mkdir(exist_ok=True)
                written += draw(folder / name / stem, endings=('png',))
        if text != old:
            files.write_atomic(page, text)
            written.append(page)
    return written


def clones(spec: Spec, experiments: Path) -> list[Run]:
    """Return the committed runs of the experiments whose clones a table shows."""
    folders = [experiments / name for name in spec.clones]
    plain = all(re.fullmatch(FOLDER_NAME, name) for name in spec.clones)
    if not plain or not all(map(compact_lines, folders)) or len(set(folders)) < len(folders):
        raise ValueError(f'clones={spec.clones} must be different experiments with {COMPACT_FILE}')
    return load(folders) if folders else []


def _embed(page: str, name: str, table: str) -> str:
    """Replace what is between the two marks of a table."""
    pattern = re.compile(BLOCK.format(re.escape(name)), re.DOTALL)
    return pattern.sub(lambda match: match[1] + table + match[2], page)


def split_where(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition('=') for text in given]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError('--where needs field=value, or field=value|value')
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(
            f'--where repeats {" and ".join(names)}: give each field once, as field=a|b'
        )
    return {name: values for name, _, values in pairs}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(__doc__, 'agentrl_jax.tables', 'FOLDER ...')
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
    add('--compact', action='store_true', help='write the runs to runs.jsonl.xz in the last folder')
    add('--rebuild', action='store_true', help='rebuild the tables of one experiment, or of all')
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    if args.rebuild:
        for folder in args.folders:
            print(*rebuild(files.local_path(folder)), sep='\n')
    elif args.compact:
        if args.where:
            raise ValueError('--compact keeps all runs of its folders: it takes no --where')
        if len(args.folders) < 2:
            raise ValueError('--compact needs the folders of the runs and, last, the one to write')
        *sources, folder = args.folders
        more = (args.metric, *split_names(args.also), *split_names(args.signals))
        runs = load(sources, more)
        path = compact(runs, folder)
        print(f'{len(runs)} runs, {path.stat().st_size / 1000:.0f} kB in {path}')
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
    with usage.one_line_errors():
        run(args)


if __name__ == '__main__':
    main()
