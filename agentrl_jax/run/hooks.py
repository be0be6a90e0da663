"""Hooks by which an extension changes how a run is built, and what it measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from agentrl_jax.models.base import Model
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import Extra, Learning
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.rollout.windows import Branches, Context
from agentrl_jax.run.streams import Streams
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Frozen, Params, Rollout, TrainState

Config = Any  # run.config.Config, whose sections are extensions


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is built of before its programs and settings."""

    config: Config
    model: Model
    tokenizer: Tokenizer
    mesh: Mesh
    load_policy: Callable  # (path) -> (Model, parameters) of another checkpoint or run
    load_tokenizer: Callable  # (path) -> the tokenizer of that checkpoint or run
    functions: Callable  # (Model) -> its ModelFns, without a critic


class Addition:
    """What an extension adds to the update and the validation of a run; by default nothing."""

    def extra(self, task: Task) -> Extra | None:
        """The hooks of an update."""
        return None

    def frozen(self, task: Task) -> dict[str, Any]:
        """Trees of arrays for Frozen.extra; those of NumPy are put on every device."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Entries of the JSON that is saved with each checkpoint."""
        return {}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise a ValueError if a run cannot resume from a checkpoint with these entries."""

    def measure(self, task: Task, context: Context | Branches | None) -> Callable | None:
        """Jitted (params, rollout) -> sums of a validation (measure.validation.summarise)."""
        return None


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is built of, as far as it is there before its programs."""

    config: Config
    mesh: Mesh
    model: Model
    fns: ModelFns
    learning: Learning
    task: Task  # of the first world
    tokenizer: Tokenizer
    draw: Callable  # (key, step) -> episodes of a step as the core draws them
    collect: Callable  # (change of RolloutSettings) -> collect of the first world with it
    score: Callable  # (params, critic_params, rollout, fns) -> its Scores


@dataclasses.dataclass(frozen=True)
class Moment:
    """A step of training after its rollout and before its update."""

    state: TrainState
    frozen: Frozen
    policy: Params  # that played
    tasks: tuple[Task, ...]  # with the turns that the step allows
    rollout: Rollout
    streams: Streams
    step: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """Something that is measured now and then."""

    name: str  # for messages
    every: int  # steps
    measure: Callable[[Moment], tuple[dict[str, jax.Array], list[dict[str, jax.Array]]]]  # metrics,
    # and the counters of what was played for them


class Extension:
    """Hooks of a section of the config that an extension adds; the defaults change nothing."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ()  # fields that a resumed run may change

    def needs_plans(self, cfg: Config) -> bool:
        """Whether training tasks need the plans of the world's best player."""
        return False

    def load(self, setup: Setup, *, learns: bool) -> Addition:
        """The addition to a run; learns: whether that run may be trained."""
        return Addition()

    def settings(self, settings: RolloutSettings, cfg: Config) -> RolloutSettings:
        """The settings of the rollouts that train."""
        return settings

    def draw(self, key: jax.Array, step: jax.Array, episodes: Episodes, *, cfg: Config) -> Episodes:
        """The episodes of a step, from those drawn with the key."""
        return episodes

    def metrics(self, rollout: Rollout) -> dict[str, jax.Array]:
        """Metrics of a rollout that trains; inside jit."""
        return {}

    def probes(self, parts: Parts) -> Iterator[Probe]:
        """What is measured during training."""
        yield from ()

    def eval_probes(self, parts: Parts) -> dict[str, Callable[[Params], float]]:
        """Metrics of validation, each a function of the policy."""
        return {}

    def start_state(self, policy: Params) -> dict[str, Any]:
        """What TrainState.extra holds at step 0; pure."""
        return {}

    def begin_step(self, state: TrainState, step: int, *, first: bool) -> TrainState:
        """The state before the rollout of a step; first: of this process, which compiles."""
        return state

    def actor(
        self, policy: Params, state: TrainState, base: Params, streams: Streams, step: int
    ) -> Params:
        """The parameters that play; base: under adapters."""
        return policy


def frozen_of(additions: tuple[Addition, ...], task: Task, place: Callable) -> dict[str, Any]:
    """Frozen.extra of a run; place: puts arrays of the host on the devices."""
    arrays = {n: x for addition in additions for n, x in addition.frozen(task).items()}
    return jax.tree.map(lambda x: place(x) if isinstance(x, np.ndarray) else x, arrays)


def extras_of(additions: tuple[Addition, ...], task: Task) -> tuple[Extra, ...]:
    """The hooks of an update of a task."""
    extras = (addition.extra(task) for addition in additions)
    return tuple(extra for extra in extras if extra is not None)
