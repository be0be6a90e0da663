"""A run: its config, its model, its worlds and the programs of its steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from agentrl_jax.models import Model
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.host import Worlds
from agentrl_jax.run.config import Config
from agentrl_jax.run.hooks import Addition, Probe
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params, Rollout


@dataclasses.dataclass(frozen=True)
class Training:
    """The worlds that train as text, and the programs of a step."""

    tasks: tuple[Task, ...]  # of one world, or of those of env.mix
    draw: Callable  # (key, step, first stream) -> episodes of each world
    collect: Callable  # (params, tasks, episodes, key) -> (rollout, counters of each world)
    collects: tuple[Callable, ...]  # of each world: (params, task, episodes, key) -> the same of it
    pack: Callable | None  # collecting.pack; None without dynamic sampling
    metrics: Callable  # (rollout, tasks) -> metrics
    probes: tuple[Probe, ...]  # what is measured now and then
    learn: Callable  # (state, frozen, rollout, key, lr_scale, base) -> (state, metrics, ...)
    rescore: Callable  # (policy, rollout) -> log-probabilities [B, T]
    eval_probes: dict[str, Callable]  # metrics of validation: (policy) -> number


@dataclasses.dataclass(frozen=True)
class Validation:
    """A pool of levels as text, its episodes, and the programs that play and count them."""

    prefix: str  # of its metrics
    task: Task
    episodes: Episodes
    collect: Callable  # (params, task, episodes, key) -> (rollout, counters)
    count: Callable  # (rollout, task) -> sums over its first eval_levels rows
    more: tuple[Callable, ...] = ()  # of extensions: (params, rollout) -> further sums

    def sums(self, params: Params, rollout: Rollout) -> dict[str, Any]:
        """All of them, on the host."""
        sums = self.count(rollout, self.task)
        for measure in self.more:
            sums |= measure(params, rollout)
        return jax.device_get(sums)


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, none of which changes."""

    config: Config
    config_dict: ConfigDict  # the same as records hold it
    mesh: Mesh
    tokenizer: Tokenizer
    model: Model
    params: Params  # as loaded or drawn, before cloning; shapes alone once a state has them
    additions: tuple[Addition, ...]  # of extensions
    txs: tuple[optax.GradientTransformation, optax.GradientTransformation | None]  # optimisers of
    # policy and critic
    training: Training
    validation: Validation  # of eval.split; of the first world of env.mix
    also: tuple[Validation, ...]  # of its other worlds, and of eval.also
    worlds: dict[str, Worlds]  # on hosts, by their names

    @property
    def pools(self) -> tuple[Validation, ...]:
        """All that is validated on."""
        return (self.validation, *self.also)
