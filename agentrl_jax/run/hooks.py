"""Hooks that let an extension change how a run is built and what it measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from agentrl_jax.models.base import Model
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import Extra, UpdateSettings
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.rollout.windows import Context, ConversationSpec
from agentrl_jax.run.streams import Streams
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Episodes, FrozenParams, Params, Rollout, TrainState

Config = Any  # run.config.Config, which contains the sections of extensions


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run that exist before its programs and update settings."""

    config: Config
    model: Model
    tokenizer: Tokenizer
    mesh: Mesh
    load_policy: Callable  # (path) -> (Model, parameters) of another checkpoint or run
    load_tokenizer: Callable  # (path) -> tokenizer of that checkpoint or run
    functions: Callable  # (Model) -> its ModelFns, without a critic


class Addition:
    """An extension's additions to a run's update and validation; empty by default."""

    def extra(self, task: Task) -> Extra | None:
        """Return the hooks of an update."""
        return None

    def frozen(self, task: Task) -> dict[str, Any]:
        """Return trees for FrozenParams.extra; NumPy arrays are replicated on all devices."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return entries of the JSON that is saved with each checkpoint."""
        return {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise a ValueError if a run cannot resume from a checkpoint with these entries."""

    def measure(self, task: Task, context: Context | ConversationSpec | None) -> Callable | None:
        """Return jitted (params, rollout) -> validation sums (measure.validation.summarise)."""
        return None


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run that exist before its programs."""

    config: Config
    mesh: Mesh
    model: Model
    fns: ModelFns
    learning: UpdateSettings
    task: Task  # of the first environment
    tokenizer: Tokenizer
    draw: Callable  # (key, step) -> episodes of a step, drawn without extensions
    collect: Callable  # (change of RolloutSettings) -> collect of the first environment with it
    score: Callable  # (params, critic_params, rollout, fns) -> Scores of the rollout


@dataclasses.dataclass(frozen=True)
class Moment:
    """A training step between its rollout and its update."""

    state: TrainState
    frozen: FrozenParams
    policy: Params  # the policy that played
    tasks: tuple[Task, ...]  # with the turn limit of the step
    rollout: Rollout
    streams: Streams
    step: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """A measurement every few steps."""

    name: str  # for messages
    every: int  # steps
    measure: Callable[[Moment], tuple[dict[str, jax.Array], list[dict[str, jax.Array]]]]  # metrics,
    # and the counters of the episodes played for them


class Extension:
    """Hooks of an extension's config section; the defaults change nothing."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ()  # fields that a resumed run may change

    def needs_plans(self, cfg: Config) -> bool:
        """Return whether training tasks need the plans of the environment's expert."""
        return False

    def load(self, setup: Setup, *, learns: bool) -> Addition:
        """Return the addition to a run. learns: whether the run may be trained."""
        return Addition()

    def settings(self, settings: RolloutSettings, cfg: Config) -> RolloutSettings:
        """Return the settings of training rollouts."""
        return settings

    def draw(self, episodes: Episodes, cfg: Config) -> Episodes:
        """Return the episodes of a step, given those drawn without extensions."""
        return episodes

    def metrics(self, rollout: Rollout) -> dict[str, jax.Array]:
        """Return metrics of a training rollout; called inside jit."""
        return {}

    def probes(self, parts: Parts) -> Iterator[Probe]:
        """Yield the measurements made during training."""
        yield from ()

    def eval_probes(self, parts: Parts) -> dict[str, Callable[[Params], float]]:
        """Return validation metrics, each a function of the policy."""
        return {}

    def start_state(self, policy: Params) -> dict[str, Any]:
        """Return the entries of TrainState.extra at step 0; a pure function."""
        return {}

    def begin_step(self, state: TrainState, step: int, *, first: bool) -> TrainState:
        """Return the state before a rollout. first: the process's first step, which compiles."""
        return state

    def actor(
        self, policy: Params, state: TrainState, base: Params, streams: Streams, step: int
    ) -> Params:
        """Return the parameters that play. base: the parameters under adapters."""
        return policy


def frozen_of(additions: tuple[Addition, ...], task: Task, place: Callable) -> dict[str, Any]:
    """Return FrozenParams.extra of a run. place: puts NumPy arrays on the devices."""
    arrays = {n: x for addition in additions for n, x in addition.frozen(task).items()}
    return jax.tree.map(lambda x: place(x) if isinstance(x, np.ndarray) else x, arrays)


def extras_of(additions: tuple[Addition, ...], task: Task) -> tuple[Extra, ...]:
    """Return the hooks of an update for a task."""
    extras = (addition.extra(task) for addition in additions)
    return tuple(extra for extra in extras if extra is not None)
