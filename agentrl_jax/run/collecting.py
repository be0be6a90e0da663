"""Collect the rollouts of a step: one, or with dynamic sampling several until the batch is full.

Dynamic sampling (DAPO, arXiv:2503.14476) buffers the groups that the filter keeps and plays further
levels, until the buffer holds an update's groups or filter.refill further rollouts are played.
Everything random is a function of the seed, the step and the rollout's number.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.machine import files, processes
from agentrl_jax.rl import filtering
from agentrl_jax.rl.learning import UpdateSettings
from agentrl_jax.rollout import rewards
from agentrl_jax.run import hosts
from agentrl_jax.run.run import Run
from agentrl_jax.run.streams import COLLECT, LEVELS, REFILL, Streams
from agentrl_jax.text.conversation import Task
from agentrl_jax.types import Episodes, EpisodeStop, Params, Rollout

Played = tuple[Rollout, tuple[Episodes, ...]]


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
    run: Run,
    params: Params,
    tasks: tuple[Task, ...],
    step: int,
    number: int = 0,
) -> tuple[Played, list[dict[str, Any]]]:
    """Play one rollout of a step: (rollout and its episodes, counters of each environment)."""
    hosts.label(run, step=step, split='train', number=number)
    if run.config.rollout.staleness:
        return collect_stale(run, params, tasks, step)
    streams = Streams(run.config.seed)
    levels = streams.key(REFILL, number) if number else streams.key(LEVELS)
    drawn = run.training.draw(levels, step, number * run.config.rollout.episodes)
    rollout, counters = run.training.collect(params, tasks, drawn, streams.key(COLLECT, step))
    check_counters(counters)  # the only check on the host
    return (rollout, drawn), counters


def collect_stale(
    run: Run, params: Params, tasks: tuple[Task, ...], step: int
) -> tuple[Played, list[dict[str, Any]]]:
    """Play a rollout of the run's only environment while episodes of later steps are in flight.

    Each step has the same levels as without staleness. Streams number the episodes of the run.
    """
    (task,), (collect,), cfg = tasks, run.training.collects, run.config
    streams = Streams(cfg.seed)

    def draw(of):
        return run.training.draw(streams.key(LEVELS), of, of * cfg.rollout.episodes)[0]

    rollout, counters = collect.collect_ahead(
        params,
        task,
        draw,
        streams.key(COLLECT),
        step=step,
        last=cfg.steps - 1,
        staleness=cfg.rollout.staleness,
    )
    return (rollout, (draw(step),)), [counters]


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
    collected, counted = play(run, params, tasks, step)
    measured = run.training.metrics(collected[0], run.training.tasks) | {'filter/collects': 1}
    if run.training.pack is None:
        return collected, sampled(counted), measured | counts(counted), None
    groups, held, count, total_passing = run.config.rollout.num_groups, collected, 0, 0
    for number in range(1 + run.config.algorithm.filter.refill):
        if number:
            check(f'rollout {number + 1} of step {step}')
            collected, counters = play(run, params, tasks, step, number)
            counted += counters
        # The count passes through the host: on devices, two layouts would compile two programs.
        held, filled, passing = run.training.pack(held, np.int32(count), collected)
        count, total_passing = int(filled), total_passing + int(passing)
        if count == groups:
            break
    measured['filter/collects'] = number + 1
    measured['filter/kept'] = total_passing / (groups * (number + 1))
    return held, sampled(counted), measured | counts(counted), count


def counts(counted: list[dict[str, Any]]) -> dict[str, float]:
    """Return metrics that count over all rollouts of a step."""
    metrics = token_counts(counted)
    if restarted := [int(one['restarted'][0]) for one in counted if 'restarted' in one]:
        metrics['rollout/restarted'] = sum(restarted)
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


def pack(
    held: Played, count: jax.Array, played: Played, *, settings: UpdateSettings
) -> tuple[Played, jax.Array, jax.Array]:
    """Append the groups of `played` that the filter keeps to the `count` groups in `held`.

    Rows beyond these groups are marked as faulty, which excludes them from training. Returns
    (held, count, number of groups kept from `played`).
    """
    group_size = settings.group_size
    _, keep = settings.algorithm.filter.keep_rows(
        played[0], groups=settings.num_groups, group_size=group_size
    )
    keep = keep.reshape(-1, group_size).any(1)
    held, count_after = filtering.refill(held, count, played, keep, group_size=group_size)
    rollout, episodes = held
    empty = jnp.arange(rollout.tokens.shape[0]) >= count_after * group_size
    stop = jnp.where(empty, EpisodeStop.ENV_ERROR, rollout.episode_stop)
    return (rollout.replace(episode_stop=stop), episodes), count_after, keep.sum()


def build_pack(settings: UpdateSettings, rows: Any, whole: Any) -> Any:
    """Return jitted `pack` over the mesh, or None without dynamic sampling."""
    if not settings.algorithm.filter.refill:
        return None
    return jax.jit(functools.partial(pack, settings=settings), out_shardings=(rows, whole, whole))
