"""The page of a run that may be training, made anew at every look.

live_page.html has the style sheet, live_sections.html the sections; live_page.js asks for these
again and puts those that changed in the place of the old ones. Whatever a file of a run holds is
shown, never run.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from agentrl_jax.measure import collapse, metrics
from agentrl_jax.records import about, markup
from agentrl_jax.records.live_charts import chart, short, spark
from agentrl_jax.records.live_run import RunFiles
from agentrl_jax.records.page_html import page_label
from agentrl_jax.records.progress import duration

AXES = {'step': 'step', 'tokens': 'progress/tokens', 'seconds': 'time_s'}
CHARTS = {  # metric -> title; those that a run has measured, in this order
    'eval/success': 'success on held-out levels',
    'eval/pass_at_k': 'held-out levels that one of k samples solves',
    'rollout/success': 'success in training',
    'rollout/return': 'return of an episode',
    'group/return_std': 'spread of returns in a group',
    'policy/entropy': 'entropy of the policy',
    'policy/kl_old': 'KL of an update',
    'policy/kl_ref': 'KL to the reference',
    'policy/kl_teacher': 'KL to the teachers',
    'policy/grad_norm': 'norm of the gradient',
    'rollout/valid_format': 'turns with a valid answer',
    'rollout/response_length': 'tokens sampled in an episode',
    'rollout/turns': 'turns of an episode',
    'rollout/env_error': 'episodes lost to faults of worlds',
    'value/explained_variance': 'variance that the critic explains',
    'optim/lr': 'learning rate',
    'perf/tokens_per_s': 'tokens sampled a second',
    'time/step_s': 'seconds of a step',
    'perf/flops_per_s': 'FLOP a second',
    'perf/flops_share': 'share of the peak of the machine',
    'perf/host_peak_bytes': 'memory of the process, bytes',
    'perf/device_peak_bytes': 'memory of a device, bytes',
}
PAGES_SHOWN = 12  # links to rollout pages
COLOURS = 7  # of other runs in the style sheet: o0, o1, ...
UNSAID = ('step', 'time_s')
SIGNALS_READ = ('action', 'limit', 'patience')
markup.TEMPLATES.filters['page_label'] = page_label


def _percent(value: float) -> str:
    return f'{100 * value:.1f} %'


def _gib(value: float) -> str:
    return f'{value / 2**30:.3g} GiB'


TILES = {  # metric -> label and form of its newest value
    'rollout/success': ('success in training', _percent),
    'rollout/return': ('return', short),
    'progress/episodes': ('episodes', short),
    'progress/tokens': ('tokens sampled', short),
    'perf/tokens_per_s': ('tokens/s', short),
    'optim/lr': ('learning rate', short),
    'perf/flops_per_s': ('FLOP/s', short),
    'perf/flops_share': ('of the peak', lambda value: f'{100 * value:.2g} %'),
    'perf/device_peak_bytes': ('device memory', _gib),
    'perf/host_peak_bytes': ('host memory', _gib),
}
Row = Mapping[str, float]


def render(run: RunFiles, others: Sequence[RunFiles], left_out: int, x: str) -> str:
    """The whole page. others: runs beside it, the newest first; left_out: how many more."""
    body = Markup(sections(run, others, left_out, x))
    return markup.render('live_page.html', name=run.name, sections=body)


def sections(run: RunFiles, others: Sequence[RunFiles], left_out: int, x: str) -> str:
    """The body of the page."""
    facts = {'run': run.name, **(_tried(about.of_run, run.config, run.argv) or {})}
    facts |= {'commit': about.short(run.commit), 'machine': run.machine}
    done = _done(run)
    measured = {name for row in run.rows for name in row}
    beside = [_listed(other, f'o{k}' if k < COLOURS else '') for k, other in enumerate(others)]
    return markup.render(
        'live_sections.html',
        run=run,
        x=x,
        title=_tried(about.title, run.config) or run.name,
        state_css='live'
        if 'training' in run.state
        else 'done'
        if run.state == 'finished'
        else 'still',
        facts=[(label, text, '') for label, text in facts.items() if text],
        now={
            'worlds in flight' if label == 'worlds' else label: '  '.join(
                f'{name} {value}' for name, value in figures.items()
            )
            for label, figures in run.now.items()
            if isinstance(figures, dict)
        },
        hint=_hint(run),
        done=done,
        tiles=_tiles(run, done),
        alarms=[*_signals(run), *_undone(run)],
        axes=[name for name, metric in AXES.items() if metric in measured],
        charts=_charts(run, others[:COLOURS], AXES[x], measured),
        PAGES_SHOWN=PAGES_SHOWN,
        runs=[_listed(run, 'own'), *beside],
        left_out=left_out,
        metrics=[_metric(run.rows, name) for name in sorted(measured - set(UNSAID))],
    )


# ---- the head ----------------------------------------------------------------------------------


def _tried(read: Callable, config: Mapping[str, Any] | None, *more: Any) -> Any:
    """What `read` makes of a config; None of one of another version, which lacks fields."""
    try:
        return read(config, *more) if config else None
    except (KeyError, TypeError, ValueError):
        return None


def _state_css(state: str) -> str:
    if 'training' in state:
        return 'live'
    return 'done' if state == 'finished' else 'still'


def _hint(run: RunFiles) -> str:
    if not run.rows and 'training' in run.state:
        return 'No step is done yet: programs are compiled in the first one.'
    if not run.rows:
        return 'Nothing has been measured yet.'
    return 'The command that started this run resumes it.' if run.state == 'stopped' else ''


def _done(run: RunFiles) -> int:
    """Steps that are done; after the last step there is only a validation."""
    done = run.rows[-1]['step'] + 1 if run.rows else 0
    return done if run.steps is None else min(done, run.steps)


def _tiles(run: RunFiles, done: int) -> list[tuple[str, str, str]]:
    """(label, text, note) of the newest figures."""
    if not run.rows:
        return []
    tiles = [('step', f'{done}', f'of {run.steps}' if run.steps else '')]
    held_out = _newest(run.rows, 'eval/success')
    if held_out is not None:
        tiles.append(('success, held out', *_success(held_out)))
    for name, (label, form) in TILES.items():
        row = _newest(run.rows, name)
        if row is not None:
            tiles.append((label, form(row[name]), ''))
    tiles.append(('time so far', duration(run.rows[-1]['time_s']), ''))
    left = _seconds_left(run.rows, run.steps, done)
    if 'training' in run.state and left is not None:
        tiles.append(('time left', duration(left), ''))
    return tiles


def _success(row: Row) -> tuple[str, str]:
    """(the held-out success, its interval where there is one)."""
    low, high = (100 * row.get(f'eval/success_{end}', math.nan) for end in ('low', 'high'))
    known = {'eval/success_low', 'eval/success_high'} <= row.keys()
    return _percent(row['eval/success']), f'{low:.1f} to {high:.1f}' if known else ''


def _newest(rows: Sequence[Row], name: str) -> Row | None:
    return next((row for row in reversed(rows) if name in row), None)


def _seconds_left(rows: Sequence[Row], steps: int | None, done: int) -> float | None:
    """By the pace of the newest steps: the first ones compile."""
    recent = rows[-20:]
    if steps is None or len(recent) < 2 or recent[-1]['step'] <= recent[0]['step']:
        return None
    pace = (recent[-1]['time_s'] - recent[0]['time_s']) / (recent[-1]['step'] - recent[0]['step'])
    return max(pace, 0.0) * (steps - done)


# ---- alarms: (class of the style sheet, text) ----------------------------------------------------


def _signals(run: RunFiles) -> list[tuple[str, str]]:
    """What the signals of measure/collapse.py say of the newest rows."""
    settings = run.config['alarm'] if run.config and 'alarm' in run.config else None
    if not run.rows or not isinstance(settings, Mapping) or 'baseline_steps' not in settings:
        return []
    known = {
        name: settings[name]
        if isinstance(settings.get(name), Mapping) and set(SIGNALS_READ) <= set(settings[name])
        else {'action': 'off'}
        for name in collapse.SIGNALS
    }
    try:
        settings = known | {'baseline_steps': settings['baseline_steps']}
        found = collapse.judge_all(run.rows, settings)
    except (TypeError, ValueError):
        return [('warn', 'the alarms of config.json cannot be read: they were changed')]
    return [
        ('bad' if alarm.level == 'alarm' else 'warn', f'{alarm.level}: {alarm.reason}')
        for alarm in found.values()
        if alarm.level != 'ok'
    ]


def _undone(run: RunFiles) -> list[tuple[str, str]]:
    return [
        ('warn', f'at step {x["at_step"]} back to step {x["to_step"]}: {x["reason"]}')
        for x in run.roll_backs
        if {'at_step', 'to_step', 'reason'} <= x.keys()
    ]


# ---- curves, runs, every metric ------------------------------------------------------------------


def _charts(
    run: RunFiles, others: Sequence[RunFiles], axis: str, measured: Collection[str]
) -> list[tuple[str, str, Markup]]:
    """(metric, title, drawing); other runs are in that of the held-out success."""
    pools = sorted(n for n in measured if n.startswith('eval_') and n.endswith('/success'))
    titles = {**CHARTS, **{name: name.replace('_', ' ').replace('/', ', ') for name in pools}}
    validated = _before(run.rows, axis)
    overlay = [(f'o{k}', _before(other.rows, axis)) for k, other in enumerate(others)]
    charts = []
    for name, title in titles.items():
        if name not in measured:
            continue
        first = name == 'eval/success'
        prefix = '' if first else f'{name.removesuffix("/success").removeprefix("eval/")}/'
        lines = {
            line: run.reference[prefix + line]
            for line in ('random', 'oracle')
            if prefix + line in run.reference and name.endswith('/success')
        }
        others_drawn = overlay if first else ()
        rows = validated if name.startswith('eval') else run.rows
        svg = chart(rows, name, x=axis, references=lines, others=others_drawn, wide=first)
        if svg:
            charts.append((name, title, Markup(svg)))
    return charts


def _before(rows: Sequence[Row], axis: str) -> list[Row]:
    """Rows at the places that were reached before their steps, in which validation comes first."""
    if axis == 'step':
        return list(rows)
    places = [0, *(row.get(axis, math.nan) for row in rows)]
    return [row | {axis: place} for row, place in zip(rows, places[:-1], strict=True)]


def _listed(run: RunFiles, css: str) -> dict[str, Any]:
    """A line of the table of runs."""
    held_out = _newest(run.rows, 'eval/success')
    return {
        'css': css,
        'name': run.name,
        'title': _tried(about.title, run.config) or '',
        'state': run.state,
        'step': run.rows[-1]['step'] if run.rows else '',
        'success': _success(held_out) if held_out else ('', ''),
    }


def _metric(rows: Sequence[Row], name: str) -> tuple[str, str, Markup, str]:
    value = short(_newest(rows, name)[name])
    return name, value, Markup(spark(rows, name)), metrics.METRICS.get(name, '')
