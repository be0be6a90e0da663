"""A run: its config, model, environments and compiled programs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from agentrl_jax.models import Model
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run.config import Config
from agentrl_jax.run.hooks import Addition, Probe
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Episodes, Params, Rollout


@dataclasses.dataclass(frozen=True)
class TrainPrograms:
    """The training environments as text, and the programs of a step."""

    tasks: tuple[Task, ...]  # one per environment
    draw: Callable  # (key, step, first stream) -> episodes of each environment
    collect: Callable  # (params, tasks, episodes, key) -> (rollout, counters per environment)
    collects: tuple[Callable, ...]  # per environment: (params, task, episodes, key) -> as `collect`
    pack: Callable | None  # refilling.pack; None without dynamic sampling
    metrics: Callable  # (rollout, tasks) -> metrics
    probes: tuple[Probe, ...]  # measurements every few steps
    learn: Callable  # (state, frozen, rollout, key, base) -> (state, metrics, ...)
    rescore: Callable  # (policy, rollout) -> log-probabilities [B, T]
    eval_probes: dict[str, Callable]  # metrics of validation: (policy) -> number


@dataclasses.dataclass(frozen=True)
class EvalPool:
    """A pool of validation levels as text, its episodes, and the programs that play them."""

    prefix: str  # of the pool's metrics
    task: Task
    episodes: Episodes
    collect: Callable  # (params, task, episodes, key) -> (rollout, counters)
    count: Callable  # (rollout, task) -> sums over its first eval_levels rows
    more: tuple[Callable, ...] = ()  # from extensions: (params, rollout) -> further sums

    def sums(self, params: Params, rollout: Rollout) -> dict[str, Any]:
        """Return the sums of `count` and `more`, on the host."""
        sums = self.count(rollout, self.task)
        for measure in self.more:
            sums |= measure(params, rollout)
        return jax.device_get(sums)


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a run needs that training does not change."""

    config: Config
    config_dict: ConfigDict  # the same config, as written to records
    mesh: Mesh
    tokenizer: Tokenizer
    model: Model
    params: Params  # initial parameters before cloning; only shapes once a state holds them
    additions: tuple[Addition, ...]  # from extensions
    # Optimisers of policy and critic
    optimizers: tuple[optax.GradientTransformation, optax.GradientTransformation | None]
    training: TrainPrograms
    pools: tuple[EvalPool, ...]  # of each environment
    worlds: dict[str, Worlds]  # environments on hosts by name

    @property
    def validation(self) -> EvalPool:
        """The pool of the first environment."""
        return self.pools[0]
