"""The settings of observation losses, and their addition to a run."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.extras.echo import observations
from agentrl_jax.run.hooks import Addition, Extension, Setup
from agentrl_jax.settings.marks import ZERO, At
from agentrl_jax.tokens.wording import wording_of


@dataclasses.dataclass(frozen=True)
class Echo(Extension):
    """Learning to predict observations."""

    coef: Annotated[float, ZERO, At('loss.observation_coef')] = 0.0  # weight of the cross-entropy
    # of observations, a mean over their tokens (ECHO: .1); 0 = off
    validates: Annotated[bool, At('eval.observations')] = False  # measure the likelihood of
    # observations (eval/observation_nll)

    def conflicts(self, run: Any, shards: int) -> Iterator[str]:
        del shards
        asked = f'loss.observation_coef={self.coef}'
        if self.coef and run.parity.loss_on != 'sampled':
            yield (
                f'{asked} and parity.loss_on={run.parity.loss_on!r} both train observations: set '
                'parity.loss_on=sampled'
            )
        if not self.coef:
            asked = 'eval.observations=True'
            if not self.validates:
                return
        if run.env.max_turns < 2:
            yield f'{asked} has no effect with env.max_turns=1: no observation follows an answer'
        if run.context.window == 1:
            yield (
                f'{asked} predicts what follows an answer, and context.window=1 hides the answer: '
                'set it to 0, or to 2 or more'
            )

    def load(self, setup: Setup, *, learns: bool) -> Addition:
        del learns
        return EchoAddition(self, setup)


@dataclasses.dataclass(frozen=True)
class EchoAddition(Addition):
    echo: Echo
    setup: Setup

    def extra(self, task):
        if not self.echo.coef:
            return None
        return observations.ObservationLoss(self.echo.coef, markers_of(self.setup.tokenizer))

    def measure(self, task, context):
        if not self.echo.validates:
            return None
        setup, cfg = self.setup, self.setup.cfg
        program = functools.partial(
            observations.measure,
            fns=setup.functions(setup.model),
            markers=markers_of(setup.tokenizer),
            context=context,
            rows=cfg.env.eval_levels * cfg.eval.samples,
            batch=cfg.batch,
        )
        return jax.jit(program, out_shardings=NamedSharding(setup.mesh, PartitionSpec()))


def markers_of(tokenizer: Any) -> observations.Markers:
    """The markers of the tokenizer's chats."""
    wording, encode = wording_of(tokenizer.chat_template), tokenizer.encode
    role = len(encode(f'user{wording.space}'))
    if wording.role_end:
        role = len(encode('user')) + 1 + len(encode(wording.space))
    start_id, end_id = map(tokenizer.special, (wording.start, wording.end))
    return observations.Markers(start_id, end_id, role)
