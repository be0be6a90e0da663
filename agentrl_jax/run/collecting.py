"""Collect the rollouts of a step: one, or with dynamic sampling several (refilling.py).

Everything random is a function of the seed, the step and the rollout's number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from agentrl_jax.machine import files, processes
from agentrl_jax.rollout import rewards
from agentrl_jax.run import hosts, refilling
from agentrl_jax.run.refilling import Played
from agentrl_jax.run.run import Run
from agentrl_jax.run.streams import COLLECT, LEVELS, REFILL, Streams
from agentrl_jax.text.conversation import Task
from agentrl_jax.types import Params


def check_counters(counters: Sequence[dict[str, Any]]) -> None:
    """Raise if an observation or a custom reward was invalid. counters: one per environment."""
    overflows = max((int(jnp.max(one['overflow'])) for one in counters), default=0)
    if overflows:
        raise RuntimeError(f'{overflows} observations were longer than the lines table allows')
    for one in counters:
        faults = int(jnp.max(one['reward_faults'])) if 'reward_faults' in one else 0
        if faults:
            raise ValueError(
                f'reward.function gave {faults} rewards that are not finite or beyond '
                f'{rewards.LARGEST:g}. The first one is {float(jnp.max(one["reward_fault"]))}. '
                'The rollout was not used for training'
            )


def check_tokens(counts: dict[str, Any], tokens: int, where: str) -> None:
    """Raise if sampled tokens have non-finite log-probabilities, or if no token was legal.

    A policy without finite log-probabilities always plays the same token, so its score is
    meaningless. counts: from token_counts. tokens: number of sampled tokens.
    """
    if empty := int(counts['rollout/no_legal_token']):
        raise RuntimeError(
            f'{where}: the grammar allowed no token for {empty} of {tokens} sampled tokens. This '
            'is a bug: please report it with the config. Another rollout.constrain may avoid it'
        )
    if nonfinite := int(counts['rollout/nonfinite']):
        raise files.Failure(
            f'{where}: {nonfinite} of {tokens} sampled tokens have log-probabilities that are not '
            'finite. The weights are damaged or have diverged, or do not match their config.json '
            '(rms_norm_eps, rope_theta). Reload the model, or resume from an earlier checkpoint '
            'with a smaller optim.lr'
        )


def check_validation(counters: dict[str, Any], where: str) -> None:
    """Raise if episodes of a validation pool are invalid, as training episodes are checked."""
    check_counters([counters])
    check_tokens(token_counts([counters]), sampled([counters]), where)


def play(
    run: Run, params: Params, tasks: tuple[Task, ...], step: int, number: int = 0
) -> tuple[Played, list[dict[str, Any]]]:
    """Play one rollout of a step: (rollout and its episodes, counters of each environment)."""
    hosts.label(run, step=step, split='train', number=number)
    if run.config.rollout.staleness:
        return hosts.collect_stale(run, params, tasks, step)
    streams = Streams(run.config.seed)
    levels = streams.key(REFILL, number) if number else streams.key(LEVELS)
    drawn = run.training.draw(levels, step, number * run.config.rollout.episodes)
    rollout, counters = run.training.collect(params, tasks, drawn, streams.key(COLLECT, step))
    check_counters(counters)  # the only check on the host
    return (rollout, drawn), counters


def collect(
    run: Run,
    params: Params,
    tasks: tuple[Task, ...],
    step: int,
    check: Callable[[str], None] = processes.go_on,
) -> tuple[Played, int, dict, int | None]:
    """Return (batch for the update, tokens sampled, metrics, groups held) of a step; see play.

    The held groups come first in the batch; their number is None without dynamic sampling. check:
    called before each further rollout (processes.Preemption.check).
    """

    def play_another(number):
        check(f'rollout {number + 1} of step {step}')
        return play(run, params, tasks, step, number)

    played, counted = play(run, params, tasks, step)
    measured = run.training.metrics(played[0], run.training.tasks) | {'filter/collects': 1}
    groups = None
    if run.training.pack is not None:
        played, more, groups, figures = refilling.fill(run, played, play_another)
        counted, measured = counted + more, measured | figures
    return played, sampled(counted), measured | counts(counted), groups


def counts(counted: list[dict[str, Any]]) -> dict[str, float]:
    """Return metrics that count over all rollouts of a step."""
    metrics = token_counts(counted)
    if restarted := [int(one['restarted'][0]) for one in counted if 'restarted' in one]:
        metrics['rollout/restarted'] = int(processes.gather(np.array([sum(restarted)])).sum())
    return metrics | hosts.figures(counted)


def sampled(counted: list[dict[str, Any]]) -> int:
    """Return the number of sampled tokens."""
    return sum(int(counters['generated'].sum()) for counters in counted)


def token_counts(counted: list[dict[str, Any]]) -> dict[str, int]:
    """Return metrics of sampled tokens that must be 0."""
    return {
        f'rollout/{name}': sum(int(np.sum(counters.get(name, 0))) for counters in counted)
        for name in ('nonfinite', 'no_legal_token')
    }
