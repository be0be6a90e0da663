"""Loading of the models of opd.teachers, and their comparison when a run resumes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl_jax.extras.distillation.distilling import Distilling
from agentrl_jax.extras.distillation.opd import OPD
from agentrl_jax.machine import checksums, files
from agentrl_jax.models import Model
from agentrl_jax.run.hooks import Addition, Extension, Setup
from agentrl_jax.text.task import hint_tokens
from agentrl_jax.tokens.tokenizer import Tokenizer
from agentrl_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Distillation(Extension):
    """Extension that builds the teachers of algorithm=opd; the algorithm has the settings."""

    FREE_ON_RESUME = ('opd.teachers',)  # paths may change; check() compares the parameters

    def needs_plans(self, cfg: Any) -> bool:
        return isinstance(cfg.algorithm, OPD) and cfg.algorithm.privileged == 'plan'

    def load(self, setup: Setup, *, learns: bool) -> Addition:
        if not learns or not isinstance(setup.config.algorithm, OPD):
            return Addition()
        names = setup.config.algorithm.teachers
        return Teachers(setup, tuple(load_teacher(name, setup) for name in names))


@dataclasses.dataclass(frozen=True)
class Teachers(Addition):
    """Teacher models, which are never trained."""

    setup: Setup
    models: tuple[tuple[Model, Params], ...]

    def extra(self, task):
        settings, width = self.setup.config.algorithm, self.setup.model.vocab_size

        def functions(model):  # cut the padding of the head to the student's size
            fns = self.setup.functions(model)
            return fns.replace(head=lambda params: model.head_kernel(params)[:, :width])

        return Distilling(
            full=settings.divergence == 'full',
            teachers=tuple(functions(model) for model, _ in self.models),
            prefix=task.prefix.shape[0] if settings.privileged != 'none' else 0,
        )

    def frozen(self, task):
        arrays = {'teachers': tuple(params for _, params in self.models)}
        if self.setup.config.algorithm.privileged == 'none':
            return arrays
        return arrays | {'hints': np.asarray(hint_tokens(task))}

    @functools.cached_property
    def digests(self) -> list[str]:
        """Digests of the parameters, independent of the mesh."""
        return [checksums.digest(params) for _, params in self.models]

    def saved(self) -> dict[str, Any]:
        return {'teachers': self.digests} if self.models else {}

    def check(self, saved: Mapping[str, Any]) -> None:
        before = saved['teachers'] if 'teachers' in saved else []
        if before != self.digests:
            named = self.setup.config.algorithm.teachers
            raise ValueError(
                f'opd.teachers={named} have other parameters than the teachers that this run '
                'started with (a run that continued has a newer policy): use the same teachers in '
                'the same order, or start in another workdir'
            )


def load_teacher(name: str, setup: Setup) -> tuple[Model, Params]:
    """Load a teacher; ValueError if its vocabulary differs from the student's."""
    path, tokenizer = files.local_path(name), setup.tokenizer
    other = setup.load_tokenizer(path)
    if vocabulary(other) != vocabulary(tokenizer):
        raise ValueError(
            f'opd.teachers: {name} uses the tokenizer {other.source}, but the policy '
            f'{tokenizer.source}: use a teacher with the same token ids'
        )
    model, params = setup.load_policy(path)
    if model.vocab_size < setup.model.vocab_size:
        raise ValueError(
            f'opd.teachers: {name} has a vocabulary of {model.vocab_size} tokens, but the policy '
            f'has {setup.model.vocab_size}: use a teacher with at least as many'
        )
    return model, params


def vocabulary(tokenizer: Tokenizer) -> tuple[list[bytes], dict[str, int]]:
    """Return (bytes of every id, id of every special token)."""
    specials = {name: tokenizer.special(name) for name in tokenizer.special_names()}
    return tokenizer.token_bytes(), specials
