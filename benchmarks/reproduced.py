"""What tpu_scripts/reproduce needs beside the commands that it runs: machine, weights, summary.

  python -m benchmarks.reproduced machine [--accelerator]   versions and devices
  python -m benchmarks.reproduced weights PATH              files of a checkpoint with their sums
  python -m benchmarks.reproduced summary OUT               OUT/summary.md from OUT/attempts.tsv

The first ends with 1 where an accelerator is asked for and jax sees none, the second where there
is no checkpoint. A line of attempts.tsv is a command that ended: stage, exit code, seconds, time of
its end, commit, command.
"""

import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from agentrl_jax.machine import files, provenance

MODEL = 'Qwen/Qwen2.5-Coder-0.5B-Instruct'
ENVIRONMENT = ('JAX_PLATFORMS', 'XLA_FLAGS')
PACKAGES = ('jax', 'jaxlib', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin', 'numpy')


class Attempt(NamedTuple):
    """A command that ended."""

    stage: str
    code: str
    seconds: str
    ended: str
    commit: str
    command: str


def machine(*, accelerator: bool) -> str:
    """The facts of this machine, one a line, the devices last."""
    import jax  # a summary needs none

    from agentrl_jax.records import about

    devices = jax.devices()
    if accelerator and devices[0].platform == 'cpu':
        raise ValueError(
            f'jax sees no accelerator here: install jax[cuda13]=={jax.__version__} or '
            'requirements/tpu.txt; JAX_PLATFORMS=cuda (or tpu) tells what fails'
        )
    versions = {name: _version(name) for name in PACKAGES}
    memory = devices[0].memory_stats()
    facts = {'commit': provenance.commit(), 'python': platform.python_version(), **versions}
    facts |= {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    facts |= {'runtime': ' '.join(devices[0].client.platform_version.split())}
    facts |= {'memory of a device': memory['bytes_limit'] if memory else None}
    lines = [f'{name}: {value}' for name, value in facts.items() if value is not None]
    return '\n'.join([*lines, about.machine()])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def weights(path: str) -> str:
    """Size and SHA-256 of the files of a checkpoint, one a line, and their sum."""
    folder = Path(path)
    if folder.suffix == '.gguf':
        found = [folder] if folder.is_file() else []
    else:
        tensors, config = sorted(folder.glob('*.safetensors')), folder / 'config.json'
        found = [config, *tensors] if tensors and config.is_file() else []
    if not found:
        raise ValueError(
            f'there is no checkpoint at {path}; hf download {MODEL} --local-dir '
            f'{MODEL.split("/")[1]} brings one; its folder, or a .gguf of it, is --weights'
        )
    lines = []
    for file in found:
        with file.open('rb') as opened:
            digest = hashlib.file_digest(opened, 'sha256').hexdigest()
        lines.append(f'{file.name}: {file.stat().st_size} bytes, sha256 {digest}')
    total = sum(file.stat().st_size for file in found)
    return '\n'.join([*lines, f'{len(found)} files, {total / 1e9:.3f} GB'])


def summary(out: Path) -> str:
    """Markdown: every stage with how it ended, success by world, the goals, every command."""
    with (out / 'attempts.tsv').open(newline='') as file:
        attempts = [Attempt(*row) for row in csv.reader(file, 'excel-tab', quoting=csv.QUOTE_NONE)]
    stages: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        stages.setdefault(attempt.stage, []).append(attempt)
    rows = [
        [
            name,
            tries[-1].code,
            len(tries),
            sum(int(attempt.seconds) for attempt in tries),
            tries[-1].ended,
            tries[-1].commit,
            result(out, tries[-1]),
        ]
        for name, tries in stages.items()
    ]
    done = {name for name, tries in stages.items() if tries[-1].code == '0'}
    missing = [name for name in stages if name not in done]
    parts = [
        f'# What was run\n\n{(out / "made").read_text().strip()}\n\n{len(done)} of {len(rows)} '
        f'stages that were begun have ended with 0{_listed(missing)}. Seconds are of all attempts.',
        _table(['stage', 'exit', 'attempts', 'seconds', 'ended', 'commit', 'result'], rows),
        '## Success on the test split, %\n\n' + _table(SUCCESS, success(out, done)),
        '## Goals\n\n' + _table(['what', 'measured', 'goal'], goals(out, done)),
        '## Commands\n\n```sh\n'
        + '\n'.join(f'# {name}\n{tries[-1].command}' for name, tries in stages.items())
        + '\n```',
    ]
    return '\n\n'.join(parts) + '\n'


def _listed(names: list[str]) -> str:
    return f'; not: {", ".join(names)}' if names else ''


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ['---'] * len(columns), *rows]
    return '\n'.join('| ' + ' | '.join(str(x) for x in line) + ' |' for line in lines)


def result(out: Path, attempt: Attempt) -> str:
    """What a stage found, in a few words; of one that failed, and of checks, the last line said."""
    kind = attempt.stage.split('.')[0]
    if attempt.code == '0' and kind in FIGURES:
        return FIGURES[kind](out, attempt.stage)
    log = (out / 'logs' / f'{attempt.stage}.log').read_text(errors='replace')
    lines = [line.strip(' =') for line in log.splitlines() if line.strip(' =')]
    return lines[-1].replace('|', '/')[:200]


def evaluation(out: Path, stage: str) -> dict[str, Any]:
    """What `evaluate` wrote; that of a trained policy lies in the folder of its run."""
    folder = stage.replace('test.', 'train.', 1)
    return files.read_json(out / folder / 'evaluation_test.json')


def _evaluated(out: Path, stage: str) -> str:
    found = evaluation(out, stage)
    low, high = 100 * found['eval/success_low'], 100 * found['eval/success_high']
    return f'success {100 * found["eval/success"]:.1f} % [{low:.1f}, {high:.1f}]'


def _trained(out: Path, stage: str) -> str:
    """Seconds of a step, and how far sampler and trainer were apart with these weights."""
    lines = (out / stage / 'metrics.jsonl').read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if 'sampler/logprob_gap' in row]
    seconds = statistics.median(row['time/step_s'] for row in rows)
    gap = max(row['sampler/logprob_gap'] for row in rows)
    return f'{len(rows)} steps, {seconds:.3g} s a step; sampler and trainer differ by <= {gap:.2g}'


def _stepped(out: Path, stage: str) -> str:
    found = files.read_json(out / f'{stage}.json')
    parts = ', '.join(f'{name} {spent:.3g}' for name, spent in found['parts'].items())
    return f'{found["seconds"]["step"]:.3g} {found["machine"]["unit"]} a step: {parts}'


def _hosted(out: Path, stage: str) -> str:
    found = files.read_json(out / f'{stage}.json')['zero_latency']
    return f'{100 * found["same_tokens"]:.0f} % of the episodes as on the device, token for token'


FIGURES = {
    'before': _evaluated,
    'test': _evaluated,
    'train': _trained,
    'step': _stepped,
    'hosts': _hosted,
}
SUCCESS = ['world', 'before', 'after, by seed', 'mean', 'random play', 'oracle']


def success(out: Path, done: set[str]) -> list[list[str]]:
    """A row for each world of which something was evaluated."""
    evaluated = sorted(
        name.split('.', 1) for name in done if name.split('.')[0] in ('before', 'test')
    )
    rows = []
    for world in sorted({name.split('.')[0] for _, name in evaluated}):
        seeds = sorted(
            (int(name.split('.')[1]), f'test.{name}')
            for kind, name in evaluated
            if kind == 'test' and name.split('.')[0] == world
        )
        before = f'before.{world}'
        found = [evaluation(out, stage) for _, stage in seeds]
        after = [100 * one['eval/success'] for one in found]
        any_of = [*found, *([evaluation(out, before)] if before in done else [])]
        rows.append(
            [
                world,
                f'{100 * any_of[-1]["eval/success"]:.1f}' if before in done else '-',
                ', '.join(f'{value:.1f}' for value in after) or '-',
                f'{statistics.mean(after):.1f}' if after else '-',
                *(f'{100 * any_of[0][f"reference/{name}"]:.1f}' for name in ('random', 'oracle')),
            ]
        )
    return rows


def goals(out: Path, done: set[str]) -> list[list[str]]:
    """The timed steps beside their goals for one H200; shares are of what this machine measured."""
    rows = []
    for stage in sorted(name for name in done if name.split('.')[0] == 'step'):
        found = files.read_json(out / f'{stage}.json')
        collect, learn = found['programs']['collect'], found['programs']['learn']
        rows += [
            [f'{stage}, {found["machine"]["unit"]}', f'{found["seconds"]["step"]:.3g}', '< 4'],
            [f'{stage}, rollout, share of limit', f'{collect["share_of_limit"]:.2f}', '>= .60'],
            [f'{stage}, update, share of matmul', f'{learn["share_of_matmul"]:.2f}', '>= .45'],
            [f'{stage}, peak memory, GiB', f'{found["peak_mib"] / 1024:.3g}', '-'],
        ]
    return rows


def main(arguments: list[str]) -> None:
    try:
        match arguments:
            case ['machine', *rest] if rest in ([], ['--accelerator']):
                print(machine(accelerator=bool(rest)))
            case ['weights', path]:
                print(weights(path))
            case ['summary', out]:
                files.write_atomic(Path(out) / 'summary.md', summary(Path(out)))
            case _:
                sys.exit(__doc__)
    except (ValueError, OSError) as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main(sys.argv[1:])
