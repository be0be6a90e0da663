"""Models whose probabilities a policy learns (algorithm=opd): loaded, compared, as functions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agentrl_jax.machine import checksums, files, sharding
from agentrl_jax.models import Model
from agentrl_jax.models.functions import ModelFns, model_functions
from agentrl_jax.run import parts
from agentrl_jax.run.config import Config
from agentrl_jax.text.task import TextTask, hint_tokens
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model that is never trained here."""

    config: Model
    params: Params
    digest: str  # of the parameters, whatever the mesh


def load(cfg: Config, student: Model, tokenizer: Any, mesh: Any) -> tuple[Teacher, ...]:
    """The models of opd.teachers; ValueError for one with other tokens than the student's."""
    found = []
    for name in cfg.algorithm.teachers:
        path = files.local_path(name)
        own = load_tokenizer(parts.tokenizer_of(path))
        if vocabulary(own) != vocabulary(tokenizer):
            raise ValueError(
                f'opd.teachers: {name} has the tokens of {own.source}, and the policy those of '
                f'{tokenizer.source}: the same ids must stand for the same texts'
            )
        config, params = parts.load_policy(path, mesh=mesh)
        if config.vocab_size < student.vocab_size:
            raise ValueError(
                f'opd.teachers: {name} has probabilities of {config.vocab_size} tokens and the '
                f'policy of {student.vocab_size}: the teacher must have as many at least'
            )
        config = dataclasses.replace(config, **parts.execution(cfg))
        found.append(Teacher(config, params, checksums.digest(params)))
    return tuple(found)


def vocabulary(tokenizer: Any) -> tuple[list[bytes], dict[str, int]]:
    """(bytes of every id, id of every special token)."""
    specials = {name: tokenizer.special(name) for name in tokenizer.special_names()}
    return tokenizer.token_bytes(), specials


def hints(cfg: Config, task: TextTask, mesh: Any) -> jax.Array | None:
    """What teachers read of each level of a task beside the policy: text.task.hint_tokens."""
    if cfg.algorithm.privileged == 'none':
        return None
    found = np.asarray(hint_tokens(task))
    return found if mesh is None else sharding.replicate(found, mesh)


def functions(
    cfg: Config, student: Model, teachers: Sequence[Model], mesh: Any
) -> tuple[ModelFns, ...]:
    """The teachers as pure functions, their heads without the padding that the student's lacks."""

    def of(config):
        config = dataclasses.replace(config, fused=parts.fused(cfg, config, mesh))
        rows = sharding.shard_rows(mesh)
        own = model_functions(config, rows, has_critic=False, shares_backbone=False)
        return own.replace(head=lambda params: config.head_kernel(params)[:, : student.vocab_size])

    return tuple(map(of, teachers))


def check(cfg: Config, teachers: Sequence[Teacher], saved: Mapping[str, Any]) -> None:
    """ValueError where a run would go on with other teachers; saved: beside its checkpoint."""
    before = saved['teachers'] if 'teachers' in saved else []
    if before != [own.digest for own in teachers]:
        raise ValueError(
            f'opd.teachers={cfg.algorithm.teachers} hold other parameters than those that this run '
            'began with (a run that went on has a newer policy): name the same ones, in the same '
            'order, or start anew in another workdir'
        )
