"""Which sign predicts collapse? A table of the runs of an experiment, usually echo_trap.

  python -m experiments.foretell runs/echo_trap/tiny --calibrate=0
  python -m experiments.foretell experiments/ragen_starpo_vs_s --where=env.name=sokoban

A run has collapsed if the mean of its last three validations is at most three quarters of its best.
The signs and their definitions are in experiments/collapse_signs.py.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence

from agentrl_jax import tables
from agentrl_jax.results import runs as tables_runs
from agentrl_jax.results.spec import FREE, choose, is_finished, make_spec, rank, split_names
from experiments import collapse_signs
from experiments.collapse_signs import Alarm, Area, Course, early_change

HEADER = ('sign', 'metric', 'collapsed, healthy', 'AUC', 'AUC, later collapses', 'AUC within arms')
HEADER += ('alarms before the collapse', 'median lead', 'false alarms')
NOTHING = '—'


def arm(run: tables_runs.Run) -> str:
    """Return the settings of a run without its seed, as JSON."""
    fields = {k: x for k, x in run.fields.items() if k != 'seed' and k.split('.')[0] not in FREE}
    return json.dumps(fields, sort_keys=True)


def read(folders: Sequence[str], where: Sequence[str] = ()) -> list[Course]:
    """Load the finished runs; invalid and unfinished ones are left out."""
    metrics = [sign.metric for sign in collapse_signs.SIGNS.values()]
    spec = make_spec({'rows': 'seed', 'where': tables.split_where(where)})
    chosen = choose(tables_runs.load(folders, metrics), spec)
    return [
        Course(arm(run), run.fields['seed'], run.rows)
        for run in chosen
        if is_finished(run) and not run.fault
    ]


def markdown(courses: Sequence[Course], calibration: Sequence, *, first: int, last: int) -> str:
    """Return a table with one row per measured sign, and notes that explain its columns."""
    lines = [HEADER, ['---'] * len(HEADER)]
    for name, sign in collapse_signs.SIGNS.items():
        changes = [early_change(course.rows, sign, first, last) for course in courses]
        if not all(map(math.isnan, changes)):
            alarm = collapse_signs.alarm(courses, sign, calibration)
            lines.append([name, f'`{sign.metric}`', *_texts(courses, changes, alarm, last)])
    table = ''.join(f'| {" | ".join(line)} |\n' for line in lines)
    bullets = notes(courses, calibration, first=first, last=last)
    return table + '\n' + ''.join(f'- {note}\n' for note in bullets)


def _texts(
    courses: Sequence[Course],
    changes: Sequence[float],
    alarm: Alarm,
    last: int,
) -> list[str]:
    """Return the cells of one sign after its name and metric."""
    known = [c for c, x in zip(courses, changes, strict=True) if not math.isnan(x)]
    collapsed = sum(course.collapsed for course in known)
    later = [math.nan if c.onset <= last else x for c, x in zip(courses, changes, strict=True)]
    areas = [collapse_signs.separation(courses, x) for x in (changes, later)]
    areas += [collapse_signs.separation(courses, changes, within=True)]
    texts = [f'{collapsed}, {len(known) - collapsed}', *map(_area_text, areas)]
    if math.isnan(alarm.threshold):
        return [*texts, NOTHING, NOTHING, NOTHING]
    leads = [lead for lead in alarm.leads if not math.isnan(lead)]
    return [
        *texts,
        f'{sum(lead > 0 for lead in leads)} of {len(alarm.leads)}',
        f'{statistics.median(leads):g}' if leads else NOTHING,
        f'{alarm.false} of {alarm.healthy}',
    ]


def notes(courses: Sequence[Course], calibration: Sequence, *, first: int, last: int) -> list[str]:
    collapsed = [course for course in courses if course.collapsed]
    later = sum(course.onset > last for course in collapsed)
    mixed = {c.arm for c in collapsed} & {c.arm for c in courses if not c.collapsed}
    below = f'at most {collapse_signs.COLLAPSED:g} of the best'
    return [
        f'{len(collapsed)} of {len(courses)} runs collapsed: the mean of their last three '
        f'validations is {below}. {later} of them collapsed after step {last}.',
        'AUC: probability that a collapsed run has a larger change than a healthy one. Change: '
        f'mean of steps {first} to {last} relative to steps 0 to {collapse_signs.START}, in the '
        'direction of the sign. [ ]: 95 % interval, seeds resampled; omitted if all draws are '
        f'equal. Later collapses: without runs that had collapsed by step {last}, for which a sign '
        f'is too late. Within arms: pairs of the {len(mixed)} arms that have both kinds.',
        'Alarm: a change larger than any in a healthy run of seeds '
        f'{", ".join(map(str, calibration))}; omitted without such a run. False alarms and leads '
        'are measured on the other seeds. Lead: steps from the alarm to the first validation that '
        f'is, like all later ones, {below} before it.',
    ]


def _area_text(area: Area) -> str:
    if math.isnan(area.auc):
        return NOTHING
    ends = f' [{area.low:.2f}, {area.high:.2f}]' if not math.isnan(area.low) else ''
    return f'{area.auc:.2f}{ends} ({area.pairs} pairs)'


def calibrating(seeds: Sequence, names: Sequence[str]) -> list:
    """Return the calibration seeds, by default the first half; ValueError unless some are left."""
    if not names:
        return list(seeds[: (len(seeds) + 1) // 2])
    listed = ', '.join(map(str, seeds))
    missing = [name for name in names if name not in map(str, seeds)]
    if missing:
        raise ValueError(f'--calibrate={missing[0]}: seeds of finished runs: {listed or "none"}')
    if len(set(names)) == len(seeds):
        raise ValueError(f'--calibrate names all seeds, {listed}; leave some to count alarms')
    return [seed for seed in seeds if str(seed) in names]


def arguments(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog='python -m experiments.foretell',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add('folders', nargs='+', help='run folders, folders of runs or compact folders')
    add('--where', action='append', default=[], help='only runs with field=value or value|value')
    add('--first', type=int, default=5, help='first step of the window of the change')
    add('--last', type=int, default=30, help='last one')
    add('--calibrate', default='', help='seeds that set the threshold; default: the first half')
    args = parser.parse_args(argv)
    if not collapse_signs.START < args.first <= args.last:
        parser.error(f'--first must be larger than {collapse_signs.START} and at most --last')
    return parser, args


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = arguments(argv)
    try:
        courses = read(args.folders, args.where)
        seeds = sorted({course.seed for course in courses}, key=rank)
        calibration = calibrating(seeds, split_names(args.calibrate))
    except (OSError, ValueError) as error:
        parser.exit(1, f'{parser.prog}: {error}\n')
    print(markdown(courses, calibration, first=args.first, last=args.last), end='')
    return 0


if __name__ == '__main__':
    sys.exit(main())
