"""Is the run collapsing? RAGEN's stop rules and early signals, as functions of its rows of metrics.

A signal watches one metric. Every value beyond its limit, one after another up to the newest row,
makes a streak; half of `patience` (rounded up) is a warning, all of it an alarm. A limit is a
number, or a multiple of what the run itself has shown: the mean of its first `baseline_steps`
values, or its highest value. What the references define, and the figures behind limits that they
leave open, are beside SIGNALS.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from agentrl_jax.settings.marks import FINITE, ONE, ZERO, In, OneOf

LEVELS = ('ok', 'warn', 'alarm')
ACTIONS = ('off', 'warn', 'stop')
QUADRANTS = ('diverse', 'template collapse', 'compressed', 'low-entropy collapse')
APPLIED = {'policy': 'update/applied', 'critic': 'update/critic_applied'}
UNVARIED_STEPS = 5  # in a row without a group that varies, before the run says what to do
# Why a step trained nothing
LOST = (
    'all episodes were lost to environment faults (rollout/env_error; replies.jsonl says which): '
    'mend the worlds, and with hosts.min_healthy > 0 such a rollout ends the run at once'
)
TOO_FEW = (
    'so many episodes were lost to environment faults (rollout/env_error; replies.jsonl says '
    'which) that no group had two left to compare'
)
ALIKE = (
    'all members of every group have the same return, so nothing says which of them did better: '
    'imitate good episodes first (clone.file, clone.episodes), play easier levels, raise '
    'rollout.temperature or rollout.group_size, or reward what comes before success '
    '(env.format_penalty, or a reward of your own)'
)
DROPPED = (
    'groups vary, but none of their episodes was kept: loosen what is kept (filter.rule; '
    'evol.threshold, dpo.min_gap), or play more groups (rollout.num_groups)'
)
REASONS = (LOST, TOO_FEW, ALIKE, DROPPED)
STD_EPS = 1e-3  # of the z-scores (RAGEN-2)
EMA_DECAY = 0.9

Row = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Signal:
    """One metric and the side of its limit that is bad."""

    metric: str
    bad: str  # 'below' or 'above' the limit
    relative: str  # to what the limit is relative: 'start', 'best' or '' (a number)
    says: str  # the beginning of the reason


# Stop rules of RAGEN's code: std_drop 0.1, 10 steps; no_success 0.01, 5 validations (its third, of
# steps that train on nothing, is filter.max_empty). The other signals are named in RAGEN
# (arXiv:2504.20073, section 4.1) without a threshold:
#   grad_spike    its Fig. 6 passes 10 x the start where the text sees the spikes (FrozenLake 8.8
#                 to 98 at step 80, Sokoban 8 to 76 at 100); healthy runs of the demo reach 6.3 x
#   entropy_rise  collapsing GRPO runs: 2.1 to 6.0 and 1.0 to 7.5; the demo stays below 1.2 x
#   entropy_drop  collapsing PPO runs fall to 0.2 x, and so do healthy ones (demo: 0.10 to 0.29 x):
#                 only a value far below both says anything
#   skipped       no optimiser step of an update changed the policy, though it had tokens to train
#                 on: losses or gradients are not finite, step after step
#   critic_skipped  the same of a critic with parameters of its own
#   faults        episodes are lost to their worlds: what is left may be the easy ones
#   cut           episodes end because no further turn fits into the token budget: what they would
#                 have earned is unknown
#   stale         turns were sampled by weights of many updates ago (rollout.staleness)
#   information_drop  RAGEN-2's template collapse: mutual information as a share of its bound. A
#                 policy that was only cloned says little of its prompts (0.03) and learns to (0.4),
#                 so the limit is a multiple of the best so far, once that is above the limit itself
SIGNALS = {
    'std_drop': Signal('group/return_std', 'below', 'start', 'in-group std of returns'),
    'no_success': Signal('eval/success', 'below', '', 'validation success'),
    'grad_spike': Signal('policy/grad_norm', 'above', 'start', 'gradient norm'),
    'entropy_drop': Signal('policy/entropy', 'below', 'start', 'entropy of the policy'),
    'entropy_rise': Signal('policy/entropy', 'above', 'start', 'entropy of the policy'),
    'information_drop': Signal('collapse/mi_share', 'below', 'best', 'what is said of the prompts'),
    'skipped': Signal('update/applied', 'below', '', 'share of optimiser steps that trained'),
    'critic_skipped': Signal(
        'update/critic_applied', 'below', '', "share of the critic's optimiser steps that trained"
    ),
    'faults': Signal('rollout/env_error', 'above', '', 'episodes lost to environment faults'),
    'cut': Signal('rollout/token_budget_stop', 'above', '', 'episodes cut by rollout.max_tokens'),
    'stale': Signal('rollout/staleness', 'above', '', 'updates since a turn was sampled'),
}


class Alarm(NamedTuple):
    """What a signal says of a run."""

    level: str  # a name of LEVELS
    reason: str  # a sentence, '' when ok
    since: int  # first step of the streak
    news: bool  # to be said: at the first warning, at the alarm, then every `patience` values


OK = Alarm('ok', '', -1, False)


def judge(
    history: Sequence[Row], name: str, *, limit: float, patience: int, baseline_steps: int = 10
) -> Alarm:
    """What a signal says of the rows so far (oldest first; rows may lack its metric).

    The rows that make the baseline never count themselves. nan is beyond no limit.
    """
    signal, first = SIGNALS[name], 0
    if signal.relative == 'best':
        values = [row[signal.metric] for row in history if signal.metric in row]
        best = max((value for value in values if math.isfinite(value)), default=0.0)
        if not best > limit:  # there never was anything that could fall
            return OK
        limit = limit * best
    elif signal.relative == 'start':
        start, first = _start_of(history, signal.metric, baseline_steps)
        if not start > 0:  # no baseline yet, or nothing that could fall or be exceeded
            return OK
        limit = limit * start
    streak, since = 0, -1
    for index in range(len(history) - 1, first - 1, -1):
        value = history[index].get(signal.metric)
        if value is None:
            continue
        if not (value < limit if signal.bad == 'below' else value > limit):
            break
        streak, since = streak + 1, int(history[index]['step'])
    half = (patience + 1) // 2
    if streak < half:
        return OK
    reason = f'{signal.says} {signal.bad} {limit:.3g} for {streak} measurements ({name})'
    news = signal.metric in history[-1] and (streak == half or streak % patience == 0)
    return Alarm('alarm' if streak >= patience else 'warn', reason, since, news)


def _start_of(history: Sequence[Row], metric: str, count: int) -> tuple[float, int]:
    """(mean of the first `count` values, index after the last of them); nan if there are fewer.

    Steps that measured nothing (nan) are no part of it.
    """
    values = []
    for index, row in enumerate(history):
        if len(values) == count:
            return sum(values) / count, index
        if metric in row and math.isfinite(row[metric]):
            values.append(row[metric])
    return math.nan, len(history)


def judge_all(history: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Alarm]:
    """Alarms of the signals that are not off; settings: those of cfg.alarm."""
    return {
        name: judge(
            history,
            name,
            limit=settings[name]['limit'],
            patience=settings[name]['patience'],
            baseline_steps=settings['baseline_steps'],
        )
        for name in SIGNALS
        if settings[name]['action'] != 'off'
    }


def untrained(history: Sequence[Row]) -> str:
    """What is wrong with a run that is at its end and trained nothing, or no critic, else ''.

    It may be too short for an alarm. A policy that a critic's warm-up holds is not meant to move.
    """
    updates = [row for row in history if APPLIED['policy'] in row]
    applied = {
        model: [row[name] for row in updates if name in row and math.isfinite(row[name])]
        for model, name in APPLIED.items()
    }
    if updates and not any(applied.values()):
        return f'nothing was trained in {len(updates)} steps: {why_nothing(updates)}'
    for model, known in applied.items():
        if known and not any(known):
            return (
                f'no optimiser step of {len(known)} updates changed the {model}, for its loss or '
                'gradient was never finite (update/skipped): nothing was trained'
            )
    return ''


def starved(history: Sequence[Row], patience: int) -> str:
    """What is wrong when the last `patience` steps kept nothing to train on, else ''; 0: never."""
    steps = [row for row in history if 'filter/empty' in row]
    newest = steps[-patience:]
    if not patience or len(newest) < patience or not all(row['filter/empty'] for row in newest):
        return ''
    return (
        f'the update kept nothing in {patience} steps in a row (filter.max_empty): '
        f'{why_nothing(newest)}'
    )


def unvaried(history: Sequence[Row], patience: int = UNVARIED_STEPS) -> str:
    """What to do when no group varied in the last `patience` steps, else ''; once a streak.

    A policy that solves everything has nothing left to learn, and needs no advice.
    """
    steps = [row for row in history if 'group/zero_std_frac' in row]
    alike = [row['group/zero_std_frac'] == 1 for row in steps]
    begins = len(alike) == patience or not any(alike[-patience - 1 : -patience])
    if len(alike) < patience or not all(alike[-patience:]) or not begins:
        return ''
    if steps[-1]['group/all_pass_frac'] == 1:
        return ''
    return f'no group varied in {patience} steps in a row (group/zero_std_frac): {ALIKE}'


def why_nothing(rows: Sequence[Row]) -> str:
    """Why steps had no token to train on: a sentence for each reason, with its share of them."""
    found = collections.Counter(map(_why_nothing, rows))
    if len(found) == 1:
        return next(iter(found))
    return '; '.join(
        f'in {found[reason]} of {len(rows)} steps {reason}' for reason in REASONS if found[reason]
    )


def _why_nothing(row: Row) -> str:
    """The reason of one step; faults of worlds first, for they leave no group that could vary."""
    lost, alike = row['rollout/env_error'], row['group/zero_std_frac']
    if lost == 1:
        return LOST
    if lost > 0 and math.isnan(alike):
        return TOO_FEW
    return ALIKE if alike == 1 else DROPPED


def worst_level(alarms: Mapping[str, Alarm]) -> int:
    """0 ok, 1 warn, 2 alarm."""
    return max((LEVELS.index(alarm.level) for alarm in alarms.values()), default=0)


def quadrant(mi_share: Any, entropy: Any, *, low_mi: float, low_entropy: float) -> Any:
    """Index into QUADRANTS by mutual information (share of its bound) and entropy (nats a token).

    RAGEN-2: entropy high, information low is template collapse; both low is low-entropy collapse;
    both high is diverse; entropy low, information high is compressed.
    """
    return (mi_share < low_mi) * 1 + (entropy < low_entropy) * 2


def smoothed_z(history: Sequence[Row]) -> float:
    """RAGEN-2's z-score over a smoothed std: mi_token / (EMA of marginal_std + 1e-3), newest row.

    The average starts at the first measurement and keeps 0.9 of itself at each further one.
    """
    average = math.nan
    for row in history:
        if 'collapse/marginal_std' in row and math.isfinite(row['collapse/marginal_std']):
            new = row['collapse/marginal_std']
            average = new if math.isnan(average) else EMA_DECAY * average + (1 - EMA_DECAY) * new
    return history[-1]['collapse/mi_token'] / (average + STD_EPS)


@dataclasses.dataclass(frozen=True)
class Reaction:
    """What a signal of collapse does, and when."""

    action: Annotated[str, OneOf(ACTIONS)] = 'warn'
    limit: Annotated[float, ZERO] = 0.0  # a number, or a multiple of what the run has shown
    patience: Annotated[int, ONE] = 10  # measurements in a row


@dataclasses.dataclass(frozen=True)
class Alarms:
    """What watches for collapse."""

    baseline_steps: Annotated[int, ONE] = 10  # first values whose mean is the run's start
    std_drop: Reaction = Reaction('warn', 0.1, 10)  # group/return_std below 0.1 x start (RAGEN)
    no_success: Reaction = Reaction('warn', 0.01, 5)  # eval/success below 0.01 (RAGEN)
    grad_spike: Reaction = Reaction('warn', 10.0, 3)  # policy/grad_norm above 10 x start
    entropy_drop: Reaction = Reaction('warn', 0.05, 10)  # policy/entropy below 0.05 x start
    entropy_rise: Reaction = Reaction('warn', 2.0, 10)  # policy/entropy above 2 x start
    information_drop: Reaction = Reaction('warn', 0.1, 3)  # collapse/mi_share below 0.1 x its best
    skipped: Reaction = Reaction('stop', 1e-6, 5)  # update/applied: no optimiser step was taken
    critic_skipped: Reaction = Reaction('stop', 1e-6, 5)  # update/critic_applied: of the critic
    faults: Reaction = Reaction('warn', 0.2, 4)  # rollout/env_error above 0.2
    cut: Reaction = Reaction('warn', 0.2, 4)  # rollout/token_budget_stop above 0.2
    stale: Reaction = Reaction('warn', 4.0, 4)  # rollout/staleness above 4
    mi_every: Annotated[int, ZERO] = 0  # steps between measurements of mutual information (RAGEN-2:
    # 5); 0 = off
    mi_pairs: Annotated[int, In(low=2)] = 64  # answers scored under every prompt
    mi_turns: Literal['first', 'any'] = 'first'  # first: first turns, a prompt per group; any: each
    # its own prompt
    mi_text: Literal['reasoning', 'answer'] = 'reasoning'  # what is scored: reasoning (up to
    # </think>) or answer (all)
    low_mi: Annotated[float, FINITE] = 0.1  # collapse/quadrant: share of its bound below which
    # information is low
    low_entropy: Annotated[float, FINITE] = 0.05  # ... and nats a token below which entropy is low

    def problems(self) -> Iterator[str]:
        if self.information_drop.action == 'stop' and not self.mi_every:
            yield 'alarm.information_drop.action can only act with alarm.mi_every > 0'

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        if self.mi_every and self.mi_turns == 'any' and run.context.window:
            yield (
                "alarm.mi_turns='any' needs context.window=0: other turns were not played from "
                'all that comes before them'
            )
        if self.mi_every and self.mi_text == 'reasoning' and not run.env.think:
            yield 'alarm.mi_text=reasoning needs env.think=True; without thinking take answer'
