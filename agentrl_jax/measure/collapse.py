"""Signs of collapse in the metrics of a run: RAGEN's stop rules and early signals.

A signal watches one metric. `patience` values in a row beyond its limit raise an alarm, half of
them (rounded up) a warning. A limit is a number, or a multiple of the mean of the first
BASELINE_STEPS values of the run ('start') or of its highest value ('best').
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from agentrl_jax.settings.marks import ZERO, NameIn

LEVELS = ('ok', 'warn', 'alarm')
BASELINE_STEPS = 10
LOW_MI, LOW_ENTROPY = 0.1, 0.05  # limits of `quadrant`
APPLIED = {'policy': 'update/applied', 'critic': 'update/critic_applied'}
UNVARIED_STEPS = 5  # steps in a row without a group that varies before a hint
STD_EPS = 1e-3  # added to the std in z-scores (RAGEN-2)
EMA_DECAY = 0.9
LOST = (
    'all episodes were lost to environment faults (rollout/env_error; see replies.jsonl): fix the '
    'environments, or set hosts.min_healthy > 0 to end the run at once'
)
TOO_FEW = (
    'environment faults left no group with two episodes to compare (rollout/env_error; see '
    'replies.jsonl)'
)
ALIKE = (
    'all members of every group have the same return: imitate good episodes first (clone.file, '
    'clone.episodes), play easier levels, raise rollout.temperature or rollout.group_size, or '
    'reward progress before success (env.format_penalty, or a reward function)'
)
DROPPED = (
    'groups vary, but no episode was kept: loosen filter.rule or '
    'evol.threshold, or play more groups (rollout.num_groups)'
)
REASONS = (LOST, TOO_FEW, ALIKE, DROPPED)
Row = Mapping[str, float]


class Signal(NamedTuple):
    """One metric and the bad side of its limit."""

    metric: str
    bad: str  # 'below' or 'above' the limit
    relative: str  # reference of the limit: 'start', 'best' or '' (the limit is a number)
    limit: float
    patience: int  # measurements in a row
    name: str  # name of the metric in messages


# std_drop and no_success are stop rules of RAGEN's code. RAGEN (arXiv:2504.20073, section 4.1 and
# Fig. 6) names the other signals without thresholds: gradients spike at 10 x the start (healthy
# demo runs reach 6.3 x), entropy rises to 2.1 x and more (demo: below 1.2 x) or falls to 0.2 x,
# which also happens in healthy runs (demo: 0.10 x). A cloned policy starts with little information
# about its prompts (0.03) and gains it (0.4), so the limit of RAGEN-2's template collapse is
# relative to the best value. skipped, critic_skipped: no optimiser step was applied. fewer_actions:
# a step penalty divided by a group's std teaches the policy to stop (measure/README.md).
SIGNALS = {
    'std_drop': Signal('group/return_std', 'below', 'start', 0.1, 10, 'in-group std of returns'),
    'no_success': Signal('eval/success', 'below', '', 0.01, 5, 'validation success'),
    'grad_spike': Signal('policy/grad_norm', 'above', 'start', 10.0, 3, 'gradient norm'),
    'entropy_drop': Signal('policy/entropy', 'below', 'start', 0.05, 10, 'policy entropy'),
    'entropy_rise': Signal('policy/entropy', 'above', 'start', 2.0, 10, 'policy entropy'),
    'fewer_actions': Signal('rollout/actions', 'below', 'start', 0.7, 5, 'actions per episode'),
    'information_drop': Signal(
        'collapse/mi_share', 'below', 'best', 0.1, 3, 'information about prompts'
    ),
    'skipped': Signal('update/applied', 'below', '', 1e-6, 5, 'share of applied optimiser steps'),
    'critic_skipped': Signal(
        'update/critic_applied', 'below', '', 1e-6, 5, 'share of applied steps of the critic'
    ),
    'faults': Signal(
        'rollout/env_error', 'above', '', 0.2, 4, 'episodes lost to environment faults'
    ),
    'cut': Signal(
        'rollout/token_budget_stop', 'above', '', 0.2, 4, 'episodes cut by rollout.max_tokens'
    ),
    'stale': Signal('rollout/staleness', 'above', '', 4.0, 4, 'updates since a turn was sampled'),
}


class Alarm(NamedTuple):
    """State of a signal."""

    level: str  # one of LEVELS
    reason: str  # '' if ok
    since: int  # first step of the streak
    news: bool  # to be reported: the first warning, the alarm, then every `patience` values


OK = Alarm('ok', '', -1, False)


def judge(history: Sequence[Row], name: str) -> Alarm:
    """Return the alarm of a signal for the rows so far (oldest first; rows may lack its metric).

    Rows of the baseline never count. nan is within every limit.
    """
    signal = SIGNALS[name]
    limit, patience = signal.limit, signal.patience
    rows = [(int(row['step']), row[signal.metric]) for row in history if signal.metric in row]
    finite = [n for n, (_, value) in enumerate(rows) if math.isfinite(value)]
    if signal.relative == 'best':
        best = max((rows[n][1] for n in finite), default=0.0)
        if not best > limit:
            return OK
        limit *= best
    elif signal.relative == 'start':
        if len(finite) < BASELINE_STEPS:
            return OK
        start = sum(rows[n][1] for n in finite[:BASELINE_STEPS]) / BASELINE_STEPS
        if not start > 0:
            return OK
        limit *= start
        rows = rows[finite[BASELINE_STEPS - 1] + 1 :]
    streak, since = 0, -1
    for step, value in reversed(rows):
        if not (value < limit if signal.bad == 'below' else value > limit):
            break
        streak, since = streak + 1, step
    half = (patience + 1) // 2
    if streak < half:
        return OK
    reason = f'{signal.name} {signal.bad} {limit:.3g} for {streak} measurements ({name})'
    news = signal.metric in history[-1] and (streak == half or streak % patience == 0)
    return Alarm('alarm' if streak >= patience else 'warn', reason, since, news)


def judge_all(history: Sequence[Row], off: Collection[str]) -> dict[str, Alarm]:
    """Return the alarms of the signals that are not off."""
    return {name: judge(history, name) for name in SIGNALS if name not in off}


def untrained(history: Sequence[Row]) -> str:
    """Return an error if a finished run trained nothing, or no critic; else ''.

    Such a run may be too short for an alarm.
    """
    updates = [row for row in history if APPLIED['policy'] in row]
    applied = {
        model: [row[name] for row in updates if name in row and math.isfinite(row[name])]
        for model, name in APPLIED.items()
    }
    if updates and not any(applied.values()):
        return f'nothing was trained in {len(updates)} steps: {explain_empty(updates)}'
    for model, known in applied.items():
        if known and not any(known):
            return (
                f'no optimiser step of {len(known)} updates changed the {model}: its loss or '
                'gradient was never finite (update/skipped)'
            )
    return ''


def starved(history: Sequence[Row], patience: int) -> str:
    """Return an error if the last `patience` steps kept no episode to train on; 0: never."""
    newest = [row for row in history if 'filter/empty' in row][-patience:]
    if not patience or len(newest) < patience or not all(row['filter/empty'] for row in newest):
        return ''
    return (
        f'the update kept nothing in {patience} steps (filter.max_empty): {explain_empty(newest)}'
    )


def no_variance_hint(history: Sequence[Row], patience: int = UNVARIED_STEPS) -> str:
    """Return a hint if no group varied in the last `patience` steps, once per streak; else ''.

    A policy that solves everything gets no hint.
    """
    steps = [row for row in history if 'group/zero_std_frac' in row]
    uniform = [row['group/zero_std_frac'] == 1 for row in steps]
    starts = len(uniform) == patience or not any(uniform[-patience - 1 : -patience])
    if len(uniform) < patience or not all(uniform[-patience:]) or not starts:
        return ''
    if steps[-1]['group/all_pass_frac'] == 1:
        return ''
    return f'no group varied in {patience} steps (group/zero_std_frac): {ALIKE}'


def explain_empty(rows: Sequence[Row]) -> str:
    """Return why steps had no token to train on: each reason with its number of steps."""

    def reason(row: Row) -> str:
        faults, uniform = row['rollout/env_error'], row['group/zero_std_frac']
        if faults == 1:
            return LOST
        if faults > 0 and math.isnan(uniform):
            return TOO_FEW
        return ALIKE if uniform == 1 else DROPPED

    counts = collections.Counter(map(reason, rows))
    if len(counts) == 1:
        return next(iter(counts))
    return '; '.join(f'in {counts[x]} of {len(rows)} steps {x}' for x in REASONS if counts[x])


def worst_level(alarms: Mapping[str, Alarm]) -> int:
    """Return the worst level: 0 ok, 1 warn, 2 alarm."""
    return max((LEVELS.index(alarm.level) for alarm in alarms.values()), default=0)


def quadrant(mi_share: Any, entropy: Any) -> Any:
    """RAGEN-2's regime: 0 diverse, 1 template collapse, 2 compressed, 3 low-entropy collapse.

    mi_share: mutual information as a share of its bound; entropy: nats per token.
    """
    return (mi_share < LOW_MI) * 1 + (entropy < LOW_ENTROPY) * 2


def smoothed_z(history: Sequence[Row]) -> float:
    """Return RAGEN-2's z-score of the last row: mi_token / (EMA of marginal_std + 1e-3)."""
    average = math.nan
    for row in history:
        new = row.get('collapse/marginal_std', math.nan)
        if math.isfinite(new):
            average = new if math.isnan(average) else EMA_DECAY * average + (1 - EMA_DECAY) * new
    return history[-1]['collapse/mi_token'] / (average + STD_EPS)


@dataclasses.dataclass(frozen=True)
class Alarms:
    """Collapse monitoring."""

    off: Annotated[tuple[str, ...], NameIn(SIGNALS)] = ()  # disabled signals (measure/README.md);
    # all others warn
    stop: Annotated[tuple[str, ...], NameIn(SIGNALS)] = (
        'skipped',
        'critic_skipped',
    )  # signals that
    # stop the run when they raise an alarm
    mi_every: Annotated[int, ZERO] = 0  # steps between measurements of mutual information (RAGEN-2:
    # 5); 0 = off
    mi_text: Literal['reasoning', 'answer'] = 'reasoning'  # text to score: reasoning (up to
    # </think>) or answer (all)
