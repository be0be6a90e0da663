"""Metrics of a training step, which change nothing."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.measure import metrics, mutual_information
from agentrl_jax.run import collecting
from agentrl_jax.run.config import Config
from agentrl_jax.run.hooks import Moment, Parts, Probe
from agentrl_jax.run.streams import PAIRS
from agentrl_jax.text.conversation import Task
from agentrl_jax.text.task import TextTask
from agentrl_jax.types import Rollout


def measure_rollout(
    rollout: Rollout, task: Task | None = None, *, cfg: Config
) -> dict[str, jax.Array]:
    """Return the metrics of a rollout. task: its only environment, which adds its own metrics."""
    measured = metrics.rollout_metrics(rollout, cfg.rollout.group_size)
    for extension in cfg.extensions:
        measured |= extension.metrics(rollout)
    names = isinstance(task, TextTask)  # on hosts, actions are texts
    measured |= metrics.agent_metrics(rollout, cfg.agent.build(), names_actions=names)
    return measured if task is None else measured | metrics.environment_metrics(rollout, task)


def probe(
    probes: Sequence[Probe], moment: Moment, first: bool, check: Callable[[str], None]
) -> dict[str, jax.Array]:
    """Return the metrics of the probes that are due.

    first: the process's first step, which compiles all probes. check: as in train.train_step.
    """
    measured = {}
    for each in probes:
        if first or moment.step % each.every == 0:
            check(f'{each.name} of step {moment.step}')
            extra, counters = jax.device_get(each.measure(moment))  # waits: see time/update_s
            collecting.check_counters(counters)
            measured |= {} if moment.step % each.every else extra
    return measured


def build_information(parts: Parts) -> Probe:
    """Build the probe of the mutual information between prompts and answers."""
    cfg = parts.config
    replicated = NamedSharding(parts.mesh, PartitionSpec())
    settings = mutual_information.Settings(
        group_size=cfg.rollout.group_size,
        text=cfg.alarm.mi_text,
        microbatch_rows=cfg.batch.microbatch_rows,
        head=dataclasses.replace(parts.learning.head, row_tokens=cfg.rollout.max_response),
    )
    information = functools.partial(
        mutual_information.information, settings=settings, fns=parts.fns, layout=replicated
    )
    program = jax.jit(information, out_shardings=replicated)

    def measure(moment: Moment):
        key = moment.streams.key(PAIRS, moment.step)
        return program(moment.policy, parts.task, moment.rollout, key), []

    return Probe('the mutual information', cfg.alarm.mi_every, measure)
