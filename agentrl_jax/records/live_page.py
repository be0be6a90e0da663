"""The live page of a run: read its workdir and render live_page.html."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from agentrl_jax.machine import files, lock
from agentrl_jax.measure import collapse, metrics
from agentrl_jax.records import about, markup, run_log
from agentrl_jax.records.live_charts import chart, short, spark
from agentrl_jax.records.page_html import PAGE_NAME, page_label
from agentrl_jax.records.progress import duration

AXES = {'step': 'step', 'tokens': 'progress/tokens', 'seconds': 'time_s'}
CHARTS = {  # metric -> title
    'eval/success': 'success on held-out levels',
    'eval/pass_at_k': 'held-out levels that one of k samples solves',
    'rollout/success': 'success in training',
    'rollout/return': 'return per episode',
    'group/return_std': 'spread of returns within a group',
    'policy/entropy': 'policy entropy',
    'policy/kl_old': 'KL per update',
    'policy/kl_ref': 'KL to the reference',
    'policy/kl_teacher': 'KL to the teachers',
    'policy/grad_norm': 'gradient norm',
    'rollout/valid_format': 'turns with a valid answer',
    'rollout/response_length': 'sampled tokens per episode',
    'rollout/turns': 'turns per episode',
    'rollout/env_error': 'episodes lost to environment faults',
    'value/explained_variance': 'variance explained by the critic',
    'optim/lr': 'learning rate',
    'perf/tokens_per_s': 'sampled tokens per second',
    'time/step_s': 'seconds per step',
    'perf/flops_per_s': 'FLOP per second',
    'perf/flops_share': "share of the machine's peak FLOP/s",
    'perf/host_peak_bytes': 'peak memory of the process, bytes',
    'perf/device_peak_bytes': 'peak memory of a device, bytes',
}
TILES = {  # metric -> label, factor and unit of its newest value
    'rollout/success': ('success in training', 100, ' %'),
    'rollout/return': ('return', 1, ''),
    'progress/episodes': ('episodes', 1, ''),
    'progress/tokens': ('tokens sampled', 1, ''),
    'perf/tokens_per_s': ('tokens/s', 1, ''),
    'optim/lr': ('learning rate', 1, ''),
    'perf/flops_per_s': ('FLOP/s', 1, ''),
    'perf/flops_share': ('of the peak', 100, ' %'),
    'perf/device_peak_bytes': ('device memory', 2**-30, ' GiB'),
    'perf/host_peak_bytes': ('host memory', 2**-30, ' GiB'),
}
COLOURS = 7  # colours of other runs in the style sheet: o0, o1, ...
Row = Mapping[str, float]
markup.TEMPLATES.filters['page_label'] = page_label


# ---- reading -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The contents of a workdir."""

    name: str
    state: str  # 'training', 'training on <host>', 'finished', 'stopped' or 'not started'
    rows: list[dict[str, float]]
    record: Mapping[str, Any]  # config.json
    config: Mapping[str, Any]  # the config in it, {} if it cannot be read
    steps: int | None
    title: str
    reference: dict[str, float]  # success of random play and of the oracle
    now: Mapping[str, Any]  # now.json, see progress.beacon
    pages: list[str]  # names of rollout pages, the newest first
    problems: list[str]  # files that could not be read

    @property
    def done(self) -> int:
        """Finished steps. The row after the last step is only a validation."""
        done = self.rows[-1]['step'] + 1 if self.rows else 0
        return done if self.steps is None else min(done, self.steps)


def is_run(folder: Path) -> bool:
    signs = (run_log.CONFIG_FILE, run_log.METRICS_FILE, run_log.REFERENCE_FILE, lock.LEASE_FILE)
    return any((folder / name).exists() for name in signs) or (folder / 'rollouts').is_dir()


def read(folder: Path) -> RunFiles:
    """Read a workdir; files that cannot be read are in `problems`."""
    problems: list[str] = []

    def load(name: str, reader: Callable[[Path], Any], default: Any) -> Any:
        path = folder / name
        try:
            value = reader(path) if path.exists() else default
        except (OSError, ValueError) as error:
            problems.append(files.format_error(error))
            return default
        return value if isinstance(value, type(default)) else default

    state = load('', _state, 'stopped')
    record = load(run_log.CONFIG_FILE, files.read_json, {})
    config = record['config'] if isinstance(record.get('config'), dict) else {}
    reference = load(run_log.REFERENCE_FILE, files.read_json, {})
    numbers = {name: run_log.to_number(value) for name, value in reference.items()}
    pages = [match for x in folder.glob('rollouts/*') if (match := PAGE_NAME.fullmatch(x.name))]
    return RunFiles(
        name=folder.name,
        state=state,
        rows=load(run_log.METRICS_FILE, _rows, []),
        record=record,
        config=config,
        steps=config['steps'] if isinstance(config.get('steps'), int) else None,
        title=_try(lambda: about.title(config), ''),
        reference={name: value for name, value in numbers.items() if value is not None},
        now=load(run_log.NOW_FILE, files.read_json, {}) if 'training' in state else {},
        pages=[x[0] for x in sorted(pages, key=lambda x: (int(x[2] or -1), x[0]), reverse=True)],
        problems=problems,
    )


def _rows(path: Path) -> list[dict[str, float]]:
    stat = path.stat()
    return _rows_of_version(path, stat.st_ino, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _rows_of_version(path: Path, *version: int) -> list[dict[str, float]]:
    return run_log.read_metrics(path)


def _state(folder: Path) -> str:
    if host := lock.owner(folder):
        return 'training' if host == lock.HERE else f'training on {host}'
    if run_log.finished_step(folder) is not None:
        return 'finished'
    return 'stopped' if (folder / run_log.METRICS_FILE).exists() else 'not started'


def _try(read: Callable[[], Any], default: Any) -> Any:
    """Call `read`; return the default if the config of another version lacks a field."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError):
        return default


# ---- rendering ---------------------------------------------------------------------------------


def render(
    run: RunFiles, others: Sequence[RunFiles] = (), left_out: int = 0, x: str = 'step'
) -> str:
    """Return the page. others: other runs, the newest first; left_out: number of further runs."""
    argv = run.record.get('argv')
    argv = list(map(str, argv)) if isinstance(argv, list) else []
    facts = {'run': run.name, **_try(lambda: about.of_run(run.config, argv), {})}
    facts |= {'commit': about.short(str(run.record.get('commit') or ''))}
    facts |= {'machine': run.record.get('machine')}
    measured = {name for row in run.rows for name in row}
    runs = [('own', run), *((f'o{k}' if k < COLOURS else '', x) for k, x in enumerate(others))]
    return markup.render(
        'live_page.html',
        run=run,
        x=x,
        facts=[(label, text, '') for label, text in facts.items() if text],
        tiles=_tiles(run),
        alarms=_alarms(run),
        axes=[name for name, metric in AXES.items() if metric in measured],
        charts=_charts(run, others[:COLOURS], AXES[x], measured),
        runs=[(css, one, _success(one.rows) or ('', '')) for css, one in runs],
        left_out=left_out,
        metrics=[
            (name, short(_newest(run.rows, name)), spark(run.rows, name), metrics.METRICS.get(name))
            for name in sorted(measured - {'step', 'time_s'})
        ],
    )


def _tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    """(label, text, note) of the newest figures."""
    if not run.rows:
        return []
    tiles = [('step', f'{run.done}', f'of {run.steps}' if run.steps else '')]
    if success := _success(run.rows):
        tiles.append(('success, held out', *success))
    for name, (label, factor, unit) in TILES.items():
        if (value := _newest(run.rows, name)) is not None:
            tiles.append((label, short(factor * value) + unit, ''))
    tiles.append(('time so far', duration(run.rows[-1]['time_s']), ''))
    first, last = run.rows[-20:][0], run.rows[-1]  # the first steps of a run compile
    if 'training' in run.state and run.steps and last['step'] > first['step']:
        pace = (last['time_s'] - first['time_s']) / (last['step'] - first['step'])
        tiles.append(('time left', duration(max(pace, 0.0) * (run.steps - run.done)), ''))
    return tiles


def _success(rows: Sequence[Row]) -> tuple[str, str] | None:
    """The newest held-out success and its interval."""
    row = next((row for row in reversed(rows) if 'eval/success' in row), None)
    if row is None:
        return None
    low, high = (100 * row.get(f'eval/success_{end}', math.nan) for end in ('low', 'high'))
    interval = '' if math.isnan(low) else f'{low:.1f} to {high:.1f}'
    return f'{100 * row["eval/success"]:.1f} %', interval


def _newest(rows: Sequence[Row], name: str) -> float | None:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _alarms(run: RunFiles) -> list[tuple[str, str]]:
    """(CSS class, text) of each alarm."""
    settings = run.config.get('alarm')
    settings = settings if isinstance(settings, dict) else {}
    off = settings.get('off') or ()
    alarms = collapse.judge_all(run.rows, off if isinstance(off, list) else ()) if run.rows else {}
    return [
        ('bad' if alarm.level == 'alarm' else 'warn', f'{alarm.level}: {alarm.reason}')
        for alarm in alarms.values()
        if alarm.level != 'ok'
    ]


def _charts(
    run: RunFiles, others: Sequence[RunFiles], axis: str, measured: set[str]
) -> list[tuple[str, str, Mapping[str, float], Markup]]:
    """(metric, title, reference lines, drawing); only the held-out success shows other runs."""
    pools = sorted(n for n in measured if n.startswith('eval_') and n.endswith('/success'))
    titles = CHARTS | {name: name.replace('_', ' ').replace('/', ', ') for name in pools}
    overlay = [(f'o{k}', _before(other.rows, axis)) for k, other in enumerate(others)]
    charts = []
    for name in (name for name in titles if name in measured):
        first = name == 'eval/success'
        prefix = '' if first else f'{name.removesuffix("success")}'
        lines = {
            line: run.reference[prefix + line]
            for line in ('random', 'oracle')
            if name.endswith('/success') and prefix + line in run.reference
        }
        rows = _before(run.rows, axis) if name.startswith('eval') else run.rows
        other_runs = overlay if first else ()
        svg = chart(rows, name, x=axis, references=lines, others=other_runs, wide=first)
        if svg:
            charts.append((name, titles[name], {k: short(v) for k, v in lines.items()}, svg))
    return charts


def _before(rows: Sequence[Row], axis: str) -> list[Row]:
    """Rows at the x where their step started, because each step starts with validation."""
    if axis == 'step':
        return list(rows)
    places = [0, *(row.get(axis, math.nan) for row in rows)]
    return [row | {axis: place} for row, place in zip(rows, places[:-1], strict=True)]
