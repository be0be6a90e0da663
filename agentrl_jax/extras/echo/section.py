"""Settings of observation losses and their hooks into a run."""

import dataclasses
import functools
from typing import Annotated

import jax
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.extras.echo import observations
from agentrl_jax.run.hooks import Addition, Extension, Setup
from agentrl_jax.settings.marks import ZERO, ConfigName, In
from agentrl_jax.settings.rules import exclude
from agentrl_jax.tokens.tokenizer import Tokenizer

# The policy must see the answer before an observation
SEES_ANSWERS = {'env.max_turns': In(low=2), 'context.window': In(low=2, also=(0,))}


@dataclasses.dataclass(frozen=True)
class Echo(Extension):
    """Observation losses."""

    coef: Annotated[float, ZERO, ConfigName('loss.observation_coef')] = 0.0  # weight of the mean
    # cross-entropy over tokens of observations (ECHO: .1); 0 = off
    validates: Annotated[bool, ConfigName('eval.observations')] = False  # measure the likelihood of
    # observations (eval/observation_nll)

    RULES = (
        *exclude({'loss.observation_coef': 0}, SEES_ANSWERS),
        *exclude({'eval.observations': False}, SEES_ANSWERS),
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
        setup, cfg = self.setup, self.setup.config
        program = functools.partial(
            observations.measure,
            fns=setup.functions(setup.model),
            markers=markers_of(setup.tokenizer),
            context=context,
            rows=cfg.env.eval_levels * cfg.eval.samples,
            batch=cfg.batch,
        )
        return jax.jit(program, out_shardings=NamedSharding(setup.mesh, PartitionSpec()))


def markers_of(tokenizer: Tokenizer) -> observations.Markers:
    """Return the message markers of the tokenizer's chat format."""
    wording, encode = tokenizer.chat_format, tokenizer.encode
    role = len(encode(f'user{wording.space}'))
    if wording.role_end:
        role = len(encode('user')) + 1 + len(encode(wording.space))
    start_id, end_id = map(tokenizer.special, (wording.start, wording.end))
    return observations.Markers(start_id, end_id, role)
