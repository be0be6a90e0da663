"""The rollouts of a step: one, or with dynamic sampling as many as it takes to fill the batch.

Dynamic sampling (DAPO, arXiv:2503.14476): groups that the filter keeps are held, and other levels
are played until there are as many groups as an update takes, or filter.refill further rollouts are
played. Everything random is a function of seed, step and number of the rollout.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.machine import files, processes
from agentrl_jax.rl import filtering
from agentrl_jax.rl.learning import Learning
from agentrl_jax.rollout import rewards
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.run import hosts
from agentrl_jax.run.run import Run
from agentrl_jax.run.streams import COLLECT, LEVELS, REFILL, Streams
from agentrl_jax.text.conversation import Task
from agentrl_jax.types import EpisodeStop, Params, Rollout

Played = tuple[Rollout, tuple[Episodes, ...]]


def check_counters(counters: Sequence[dict[str, Any]]) -> None:
    """counters: of what was played, one for each world."""
    lost = max((int(jnp.max(one['overflow'])) for one in counters), default=0)
    if lost:
        raise RuntimeError(f'{lost} observations were longer than the table of lines allows')
    for one in counters:
        faults = int(jnp.max(one['reward_faults'])) if 'reward_faults' in one else 0
        if faults:
            raise ValueError(
                f'reward.function gave {faults} rewards that are not finite or beyond '
                f'{rewards.LARGEST:g}, the first of them {float(jnp.max(one["reward_fault"]))}: '
                'nothing was trained on them'
            )


def check_tokens(counts: dict[str, Any], tokens: int, where: str) -> None:
    """Raises if sampled tokens have log-probabilities that are not finite, or no token was legal.

    A policy without finite log-probabilities plays one and the same token: what it reaches is no
    figure of a policy. counts: of token_counts; tokens: sampled ones.
    """
    if empty := int(counts['rollout/no_legal_token']):
        raise RuntimeError(
            f'{where}: the grammar allowed no token for {empty} of {tokens} sampled tokens, which '
            'is a bug. Set rollout.constrain to another spelling, and report it with the config'
        )
    if nonfinite := int(counts['rollout/nonfinite']):
        raise files.Failure(
            f'{where}: {nonfinite} of {tokens} sampled tokens have log-probabilities that are not '
            'finite: the weights are damaged or have diverged, or the config.json beside them is '
            'not theirs (rms_norm_eps, rope_theta). Load the model anew, or go on from an earlier '
            'checkpoint with a smaller optim.lr'
        )


def play(
    run: Run,
    params: Params,
    tasks: tuple[Task, ...],
    streams: Streams,
    step: int,
    number: int = 0,
) -> tuple[Played, list[dict[str, Any]]]:
    """(rollout and its episodes, counters of each world) of one rollout of a step; waits for it."""
    hosts.label(run, step=step, split='train', number=number)
    if run.config.rollout.staleness:
        return play_ahead(run, params, tasks, streams, step)
    levels = streams.key(REFILL, number) if number else streams.key(LEVELS)
    drawn = run.training.draw(levels, step, number * run.config.rollout.episodes)
    rollout, counters = run.training.collect(params, tasks, drawn, streams.key(COLLECT, step))
    check_counters(counters)  # the host's only look at it
    return (rollout, drawn), counters


def play_ahead(
    run: Run, params: Params, tasks: tuple[Task, ...], streams: Streams, step: int
) -> tuple[Played, list[dict[str, Any]]]:
    """play of the one world of a run, while episodes of later steps are played beside.

    Levels are those of a step that plays its own alone; streams number the episodes of the run.
    """
    (task,), (collect,), cfg = tasks, run.training.collects, run.config

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
    streams: Streams,
    step: int,
    check: Callable[[str], None] = processes.go_on,
) -> tuple[Played, int, dict, int | None]:
    """(what the update gets, tokens sampled, metrics, groups held) of a step; see play.

    The groups that dynamic sampling holds are the first ones; None without it. check: called
    before each further rollout, see processes.Preemption.check.
    """
    played, counted = play(run, params, tasks, streams, step)
    measured = run.training.metrics(played[0], run.training.tasks) | {'filter/collects': 1}
    if run.training.pack is None:
        return played, sampled(counted), measured | counts(counted), None
    groups, held, count, kept = run.config.rollout.num_groups, played, 0, 0
    for number in range(1 + run.config.algorithm.filter.refill):
        if number:
            check(f'rollout {number + 1} of step {step}')
            played, counters = play(run, params, tasks, streams, step, number)
            counted += counters
        # The count goes through the host: on devices it would have two layouts, so two programs.
        held, filled, found = run.training.pack(held, np.int32(count), played)
        count, kept = int(filled), kept + int(found)
        if count == groups:
            break
    measured['filter/collects'] = number + 1
    measured['filter/kept'] = kept / (groups * (number + 1))
    return held, sampled(counted), measured | counts(counted), count


def counts(counted: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics that are counted in all rollouts of a step."""
    metrics = token_counts(counted)
    if restarted := [int(one['restarted'][0]) for one in counted if 'restarted' in one]:
        metrics['rollout/restarted'] = sum(restarted)
    return metrics | hosts.figures(counted)


def sampled(counted: list[dict[str, Any]]) -> int:
    """Tokens that rollouts sampled."""
    return sum(int(counters['generated'].sum()) for counters in counted)


def token_counts(counted: list[dict[str, Any]]) -> dict[str, int]:
    """Metrics of sampled tokens that must be 0."""
    return {
        f'rollout/{name}': sum(int(np.sum(counters.get(name, 0))) for counters in counted)
        for name in ('nonfinite', 'no_legal_token')
    }


def pack(
    held: Played, count: jax.Array, played: Played, *, how: Learning
) -> tuple[Played, jax.Array, jax.Array]:
    """Appends the groups of `played` that the filter keeps to the `count` held.

    What comes after the groups that are held is not
    trained on: it is marked as faulty. Returns (held, count, groups kept of `played`).
    """
    group_size = how.group_size
    _, keep = how.algorithm.filter.keep_rows(
        played[0], groups=how.num_groups, group_size=group_size
    )
    keep = keep.reshape(-1, group_size).any(1)
    held, count_after = filtering.refill(held, count, played, keep, group_size=group_size)
    rollout, episodes = held
    empty = jnp.arange(rollout.tokens.shape[0]) >= count_after * group_size
    stop = jnp.where(empty, EpisodeStop.ENV_ERROR, rollout.episode_stop)
    return (rollout.replace(episode_stop=stop), episodes), count_after, keep.sum()


def build_pack(how: Learning, rows: Any, whole: Any) -> Any:
    """Jitted pack over the mesh, None without dynamic sampling."""
    if not how.algorithm.filter.refill:
        return None
    return jax.jit(functools.partial(pack, how=how), out_shardings=(rows, whole, whole))
