"""Hooks of extensions: a section of the config builds an Addition, which a run then calls."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from agentrl_jax.models import Model
from agentrl_jax.rl.learning import Extra
from agentrl_jax.rollout.windows import Branches, Context
from agentrl_jax.text.conversation import Task


@dataclasses.dataclass(frozen=True)
class Parts:
    """What an extension builds from."""

    cfg: Any  # run.config.Config, which imports the extensions
    model: Model
    tokenizer: Any
    mesh: Mesh
    load_policy: Callable  # (path) -> (Model, parameters) of another checkpoint or run
    load_tokenizer: Callable  # (path) -> the tokenizer of that checkpoint or run
    functions: Callable  # (Model) -> its ModelFns, without a critic


class Addition:
    """What an extension adds to one run; the defaults add nothing."""

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


class Extension:
    """Hooks of a section of the config; the defaults change nothing."""

    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = ()  # fields that a resumed run may change

    def needs_plans(self, cfg: Any) -> bool:
        """Whether training tasks need the plans of the world's best player."""
        return False

    def build(self, parts: Parts, *, learns: bool) -> Addition:
        """The addition to a run; learns: whether that run may be trained."""
        return Addition()


def sections(cfg: Any) -> tuple[Extension, ...]:
    """The sections of a config that have hooks."""
    found = (getattr(cfg.extras, field.name) for field in dataclasses.fields(cfg.extras))
    return tuple(section for section in found if isinstance(section, Extension))


def frozen_of(additions: tuple[Addition, ...], task: Task, place: Callable) -> dict[str, Any]:
    """Frozen.extra of a run; place: puts arrays of the host on the devices."""
    arrays = {n: x for addition in additions for n, x in addition.frozen(task).items()}
    return jax.tree.map(lambda x: place(x) if isinstance(x, np.ndarray) else x, arrays)


def extras_of(additions: tuple[Addition, ...], task: Task) -> tuple[Extra, ...]:
    """The hooks of an update of a task."""
    found = (addition.extra(task) for addition in additions)
    return tuple(extra for extra in found if extra is not None)
