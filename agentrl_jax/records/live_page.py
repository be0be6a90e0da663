"""The page of a run that may be training: sections of escaped HTML, made anew at every look.

live_page.html has the style sheet; live_page.js asks for the sections again and puts those that
changed in the place of the old ones. Whatever stands in a file of a run is shown, never run.
"""

import importlib.resources
import math
import string
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl_jax.measure import collapse, metrics
from agentrl_jax.records import about
from agentrl_jax.records.live_charts import chart, short, spark
from agentrl_jax.records.live_run import RunFiles
from agentrl_jax.records.markup import escape, escape_attribute, many
from agentrl_jax.records.page_html import page_label

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


def render(run: RunFiles, others: Sequence[RunFiles], left_out: int, x: str) -> str:
    """The whole page. others: runs beside it, the newest first; left_out: so many more."""
    template = importlib.resources.files('agentrl_jax.records').joinpath('live_page.html')
    return string.Template(template.read_text(encoding='utf-8')).substitute(
        title=escape_attribute(run.name),
        sections=sections(run, others, left_out, x),
    )


def sections(run: RunFiles, others: Sequence[RunFiles], left_out: int, x: str) -> str:
    """The body of the page; each section has an id by which it is replaced."""
    shown = others[:COLOURS]
    parts = {
        'head': _head(run),
        'now': _now(run),
        'tiles': _tiles(run),
        'alarms': _alarms(run),
        'curves': _curves(run, shown, x),
        'rollouts': _rollouts(run),
        'runs': _runs(run, others, left_out),
        'every': _every(run),
    }
    return '\n'.join(f'<section id="{name}">{body}</section>' for name, body in parts.items())


# ---- the head ----------------------------------------------------------------------------------


def _head(run: RunFiles) -> str:
    css = 'live' if 'training' in run.state else 'done' if run.state == 'finished' else 'still'
    title = _tried(about.title, run.config) or run.name
    facts = {'run': run.name, **(_tried(about.of_run, run.config, run.argv) or {})}
    facts |= {'commit': about.short(run.commit), 'machine': run.machine}
    listed = ''.join(
        f'<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>'
        for label, text in facts.items()
        if text
    )
    return (
        f'<div class="top"><h1>{escape(title)}</h1>'
        f'<span class="state {css}">{escape(run.state)}</span></div><dl class="about">{listed}</dl>'
    )


def _tried(read: Callable, config: Mapping[str, Any] | None, *more: Any) -> Any:
    """What `read` makes of a config; None of one of another version, which lacks fields."""
    try:
        return read(config, *more) if config else None
    except (KeyError, TypeError, ValueError):
        return None


def _now(run: RunFiles) -> str:
    """What the training does at this moment, and files that cannot be read."""
    words = [f'<p class="bad">{escape(problem)}</p>' for problem in run.problems]
    for label, figures in run.now.items():
        if isinstance(figures, dict):
            pairs = '  '.join(f'{name} {value}' for name, value in figures.items())
            name = 'worlds in flight' if label == 'worlds' else label
            words.append(f'<p><b>{escape(name)}</b> {escape(pairs)}</p>')
    if not run.rows and 'training' in run.state:
        words.append('<p>No step is done yet: programs are compiled in the first one.</p>')
    elif not run.rows:
        words.append('<p>Nothing has been measured yet.</p>')
    elif run.state == 'stopped':
        words.append('<p>The command that started this run resumes it.</p>')
    return ''.join(words)


def _tiles(run: RunFiles) -> str:
    if not run.rows:
        return ''
    last = run.rows[-1]
    done = min(last['step'] + 1, run.steps) if run.steps is not None else last['step'] + 1
    tiles = {'step': f'{done}' + (f' <small>of {run.steps}</small>' if run.steps else '')}
    held_out = _newest(run.rows, 'eval/success')
    if held_out is not None:
        tiles['success, held out'] = _success(held_out)
    for name, label, form in (
        ('rollout/success', 'success in training', lambda v: f'{100 * v:.1f} %'),
        ('rollout/return', 'return', short),
        ('progress/episodes', 'episodes', short),
        ('progress/tokens', 'tokens sampled', short),
        ('perf/tokens_per_s', 'tokens/s', short),
        ('optim/lr', 'learning rate', short),
        ('perf/flops_per_s', 'FLOP/s', short),
        ('perf/flops_share', 'of the peak', lambda v: f'{100 * v:.2g} %'),
        ('perf/device_peak_bytes', 'device memory', lambda v: f'{v / 2**30:.3g} GiB'),
        ('perf/host_peak_bytes', 'host memory', lambda v: f'{v / 2**30:.3g} GiB'),
    ):
        row = _newest(run.rows, name)
        if row is not None:
            tiles[label] = form(row[name])
    tiles['time so far'] = _duration(last['time_s'])
    left = _seconds_left(run.rows, run.steps, done)
    if 'training' in run.state and left is not None:
        tiles['time left'] = _duration(left)
    body = ''.join(f'<div><dt>{label}</dt><dd>{text}</dd></div>' for label, text in tiles.items())
    bar = f'<progress max="{run.steps}" value="{done}"></progress>' if run.steps else ''
    return f'{bar}<dl class="tiles">{body}</dl>'


def _success(row: Mapping[str, float]) -> str:
    text = f'{100 * row["eval/success"]:.1f} %'
    if {'eval/success_low', 'eval/success_high'} <= row.keys():
        low, high = (100 * row[f'eval/success_{end}'] for end in ('low', 'high'))
        text += f' <small>{low:.1f} to {high:.1f}</small>'
    return text


def _newest(rows: Sequence[Mapping[str, float]], name: str) -> Mapping[str, float] | None:
    return next((row for row in reversed(rows) if name in row and math.isfinite(row[name])), None)


def _seconds_left(rows: Sequence[Mapping[str, float]], steps: int | None, done: int):
    """By the pace of the newest steps: the first ones compile."""
    recent = rows[-20:]
    if steps is None or len(recent) < 2 or recent[-1]['step'] <= recent[0]['step']:
        return None
    pace = (recent[-1]['time_s'] - recent[0]['time_s']) / (recent[-1]['step'] - recent[0]['step'])
    return max(pace, 0.0) * (steps - done)


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return '?'
    if seconds < 60:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    return f'{minutes} min' if minutes < 60 else f'{minutes // 60} h {minutes % 60:02d} min'


# ---- alarms ------------------------------------------------------------------------------------


def _alarms(run: RunFiles) -> str:
    lines = [
        f'<li class="{css}">{escape(text)}</li>' for css, text in [*_signals(run), *_undone(run)]
    ]
    return f'<h2>Alarms</h2><ul class="alarms">{"".join(lines)}</ul>' if lines else ''


def _signals(run: RunFiles) -> list[tuple[str, str]]:
    """What the signals of measure/collapse.py say of the newest rows."""
    settings = run.config['alarm'] if run.config and 'alarm' in run.config else None
    if not run.rows or not isinstance(settings, Mapping) or 'baseline_steps' not in settings:
        return []
    known = {
        name: settings[name]
        if name in settings and set(SIGNALS_READ) <= set(settings[name])
        else {'action': 'off'}
        for name in collapse.SIGNALS
    }
    found = collapse.judge_all(run.rows, known | {'baseline_steps': settings['baseline_steps']})
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


# ---- curves ------------------------------------------------------------------------------------


def _curves(run: RunFiles, others: Sequence[RunFiles], x: str) -> str:
    if not run.rows:
        return ''
    axis = AXES[x]
    measured = {name for row in run.rows for name in row}
    pools = sorted(n for n in measured if n.startswith('eval_') and n.endswith('/success'))
    titles = {**CHARTS, **{name: name.replace('_', ' ').replace('/', ', ') for name in pools}}
    overlay = [(f'o{k}', other.rows) for k, other in enumerate(others)]
    drawn = []
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
        svg = chart(
            run.rows,
            name,
            x=axis,
            references=lines,
            others=overlay if first else (),
            wide=first,
        )
        if svg:
            css = 'card wide' if first else 'card'
            drawn.append(
                f'<figure class="{css}"><figcaption><b>{escape(title)}</b> '
                f'<small>{escape(name)}</small></figcaption>{svg}</figure>'
            )
    choices = ' '.join(
        f'<b>{name}</b>' if name == x else f'<a href="?x={name}">{name}</a>'
        for name, metric in AXES.items()
        if metric in measured
    )
    return (
        f'<h2>Curves <small>over {choices}</small></h2><div class="charts">{"".join(drawn)}</div>'
    )


# ---- rollouts, runs, every metric ----------------------------------------------------------------


def _rollouts(run: RunFiles) -> str:
    if not run.pages:
        return ''
    links = ' '.join(
        f'<a href="rollouts/{urllib.parse.quote(name, safe="")}">{escape(page_label(name))}</a>'
        for name in run.pages[:PAGES_SHOWN]
    )
    more = len(run.pages) - PAGES_SHOWN
    more = f' <small>and {more} older ones</small>' if more > 0 else ''
    newest = urllib.parse.quote(run.pages[0], safe='')
    return (
        f'<h2>Rollouts <small>the newest first</small></h2><p class="links">{links}{more}</p>'
        f'<details id="newest"><summary>The newest one, here</summary><iframe sandbox="" '
        f'loading="lazy" title="the newest rollout" src="rollouts/{newest}"></iframe></details>'
    )


def _runs(run: RunFiles, others: Sequence[RunFiles], left_out: int) -> str:
    if not others:
        return ''
    lines = [_run_line(run, 'own')]
    lines += [_run_line(other, f'o{k}' if k < COLOURS else '') for k, other in enumerate(others)]
    left = f'<p class="sub">{many(left_out, "older run")} left out.</p>' if left_out else ''
    return (
        '<h2>Runs beside it <small>their held-out success is in the first chart</small></h2>'
        '<table><thead><tr><th></th><th>run</th><th>method and world</th><th>state</th>'
        '<th class="n">step</th><th class="n">success, held out</th></tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table>{left}'
    )


def _run_line(run: RunFiles, css: str) -> str:
    held_out = _newest(run.rows, 'eval/success')
    step = f'{run.rows[-1]["step"]}' if run.rows else ''
    swatch = f'<i class="swatch {css}"></i>' if css else ''
    name = f'<a href="../{urllib.parse.quote(run.name, safe="")}/">{escape(run.name)}</a>'
    title = _tried(about.title, run.config) or ''
    return (
        f'<tr><td>{swatch}</td><td>{name if css != "own" else escape(run.name)}</td>'
        f'<td>{escape(title)}</td><td>{escape(run.state)}</td><td class="n">{step}</td>'
        f'<td class="n">{_success(held_out) if held_out else ""}</td></tr>'
    )


def _every(run: RunFiles) -> str:
    if not run.rows:
        return ''
    names = sorted({name for row in run.rows for name in row} - set(UNSAID))
    lines = []
    for name in names:
        row = _newest(run.rows, name)
        value = 'nan' if row is None else short(row[name])
        meaning = metrics.METRICS[name] if name in metrics.METRICS else ''
        lines.append(
            f'<tr><td>{escape(name)}</td><td class="n">{value}</td><td>{spark(run.rows, name)}</td>'
            f'<td>{escape(meaning)}</td></tr>'
        )
    return (
        f'<details id="metrics"><summary>Every metric ({len(names)})</summary><table>'
        f'<tbody>{"".join(lines)}</tbody></table></details>'
    )
