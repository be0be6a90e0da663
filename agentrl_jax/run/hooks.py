"""Hooks by which an extension changes how a run is built, and what it measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from agentrl_jax.models.base import Model
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.learning import Learning
from agentrl_jax.rollout.episodes import Episodes
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.run.streams import Streams
from agentrl_jax.text.conversation import Task
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Frozen, Params, Rollout, TrainState

if TYPE_CHECKING:
    from agentrl_jax.run.config import Config


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is built of, as far as it is there before its programs."""

    cfg: Config
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

    def settings(self, settings: RolloutSettings, cfg: Config) -> RolloutSettings:
        """The settings of the rollouts that train."""
        del cfg
        return settings

    def draw(self, key: jax.Array, step: jax.Array, episodes: Episodes, *, cfg: Config) -> Episodes:
        """The episodes of a step, from those drawn with the key."""
        del key, step, cfg
        return episodes

    def metrics(self, rollout: Rollout) -> dict[str, jax.Array]:
        """Metrics of a rollout that trains; inside jit."""
        del rollout
        return {}

    def probes(self, parts: Parts) -> Iterator[Probe]:
        """What is measured during training."""
        del parts
        yield from ()

    def eval_probes(self, parts: Parts) -> dict[str, Callable[[Params], float]]:
        """Metrics of validation, each a function of the policy."""
        del parts
        return {}

    def start_state(self, policy: Params) -> dict[str, Any]:
        """What TrainState.extra holds at step 0; pure."""
        del policy
        return {}

    def begin_step(self, state: TrainState, step: int, *, first: bool) -> TrainState:
        """The state before the rollout of a step; first: of this process, which compiles."""
        del step, first
        return state

    def actor(
        self, policy: Params, state: TrainState, base: Params, streams: Streams, step: int
    ) -> Params:
        """The parameters that play; base: under adapters."""
        del state, base, streams, step
        return policy
