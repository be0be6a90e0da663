"""Settings of an update, each section once, and what follows from them."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.rollout.windows import Branches, Context, Windows
from agentrl_jax.settings.marks import MOMENT, ONE, POSITIVE, SHARE, ZERO, At, Off, When
from agentrl_jax.text.grammar import Bits
from agentrl_jax.types import Batch, Frozen, Params, Rollout, Scores

SAMPLER_BOUNDS = {'tis': (0.0, 2.0), 'icepop': (0.5, 5.0)}


@dataclasses.dataclass(frozen=True)
class Batching:
    """From the rows of a rollout to optimiser steps."""

    minibatch_rows: Annotated[int, ONE] = 32  # episodes per optimiser step
    microbatch_rows: Annotated[int, ONE] = 8  # episodes per forward and backward pass
    epochs: Annotated[int, ONE] = 1  # passes over a rollout
    shuffle: bool = False  # draw the episodes of optimiser steps anew in each pass
    head_chunk: Annotated[int, ONE] = 1024  # tokens per chunk of the output head
    widths: Annotated[int, ONE] = 1  # widths that are compiled, for updates and cloning: each
    # micro-batch of rows of like length takes the narrowest; 1 = all as wide as rollout.max_tokens
    prefix_rows: Annotated[int, ONE] = 1  # rows side by side, a group or a part of one, of which an
    # update computes once what they begin with alike, and which batch.shuffle leaves together; 1 =
    # none. Widths are then those of what is left of a row


@dataclasses.dataclass(frozen=True)
class Critic:
    """The model of values, where the algorithm has one."""

    share_backbone: bool = False  # a value head on the policy instead of a separate model
    warmup_steps: Annotated[int, ZERO] = 0  # first steps in which only a separate critic trains
    updates: Annotated[int, ONE] = 1  # optimiser steps of a separate critic before each of the
    # policy's (SAO: 2)
    freeze_attention: bool = False  # of a separate critic: what is not attention trains (SAO)
    clip: Annotated[float, ZERO, At('loss.value_clip')] = 0.5  # of values around the old ones; 0 =
    # off
    coef: Annotated[float, ZERO, At('loss.value_coef')] = 1.0  # weight of the value loss with
    # critic.share_backbone; that loss is in squared units of the return: returns up to 10 need a
    # hundredth of what suits 1


CORRECTS = When(lambda sampler: sampler.corrects, 'loss.sampler_correction=tis or icepop')
FALLS = When(lambda optim: optim.schedule != 'constant', 'optim.schedule=linear or cosine')


@dataclasses.dataclass(frozen=True)
class Sampler:
    """For a sampler that is not the trainer: pi_trainer / pi_sampler as a factor of advantages."""

    AT = 'loss.sampler_'
    correction: Literal['off', 'tis', 'icepop'] = 'off'  # clipped (tis), or 0 outside the bounds
    # (icepop)
    low: Annotated[float | None, SHARE, CORRECTS] = None  # lower bound of the factor (tis 0,
    # icepop .5)
    high: Annotated[float | None, ONE, CORRECTS] = None  # upper bound (tis 2, icepop 5)

    @property
    def corrects(self) -> bool:
        return self.correction != 'off'

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = SAMPLER_BOUNDS[self.correction]
        return low if self.low is None else self.low, high if self.high is None else self.high


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW after a global-norm clip."""

    lr: Annotated[float, POSITIVE] = 1e-6
    critic_lr: Annotated[float, POSITIVE] = 1e-5
    beta1: Annotated[float, MOMENT] = 0.9
    beta2: Annotated[float, MOMENT] = 0.999
    weight_decay: Annotated[float, ZERO] = 0.01
    max_grad_norm: Annotated[float, POSITIVE] = 1.0  # global norm
    warmup_steps: Annotated[int, ZERO] = 0  # optimiser steps of linear warm-up
    schedule: Literal['constant', 'linear', 'cosine'] = 'constant'  # of both rates after the
    # warm-up
    schedule_steps: Annotated[int, ZERO, Off(0), FALLS] = (
        0  # optimiser steps until the rates are at
    )
    # their end; needed for linear and cosine, so that a longer run is the same run
    final_lr: Annotated[float, SHARE, Off(0.0), FALLS] = 0.0  # where linear and cosine end, as a
    # share of the rate

    def rate(self, lr: float, every: int = 1) -> optax.ScalarOrSchedule:
        """The learning rate of each optimiser step: it rises linearly to lr in warmup_steps.

        every: optimiser steps that count as one (those of a critic before each of the policy's).

        The first of n warm-up steps uses lr / n, so no step is lost. After the warm-up the rate
        stays, or falls in schedule_steps to final_lr * lr: linearly, or along half a cosine.
        """
        rate, n = lr, self.warmup_steps
        if self.schedule == 'linear':
            rate = optax.linear_schedule(lr, self.final_lr * lr, self.schedule_steps)
        elif self.schedule == 'cosine':
            rate = optax.cosine_decay_schedule(lr, self.schedule_steps, alpha=self.final_lr)
        if n:
            rise = optax.linear_schedule(lr / n, lr, max(n - 1, 1))
            rate = rise if rate is lr else optax.join_schedules([rise, rate], [n])
        if every == 1 or rate is lr:
            return rate
        return lambda count: rate(count // every)

    def tx(self, lr: float, every: int = 1) -> optax.GradientTransformation:
        """Global-norm clip, then AdamW with the rate of rate(lr, every)."""
        rate = self.rate(lr, every)
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adamw(rate, b1=self.beta1, b2=self.beta2, weight_decay=self.weight_decay),
        )


class Forward(NamedTuple):
    """The policy's forward pass over a micro-batch."""

    params: Params
    hidden: jax.Array  # [B, T, D]
    logprobs: jax.Array  # float32 [B, T] of the trained tokens; without a gradient


class Models(NamedTuple):
    """The functions of the policy's model, and the parameters that a run never changes."""

    fns: ModelFns
    frozen: Frozen


@dataclasses.dataclass(frozen=True)
class Extra:
    """What an extension adds to an update; the defaults add nothing. It has to be hashable."""

    METRICS: ClassVar[tuple[str, ...]] = ()  # of loss(), as means over the tokens of reads()

    def score(
        self,
        rollout: Rollout,
        scores: Scores,
        models: Models,
        how: 'Learning',
        windows: Windows | None,
    ) -> Scores:
        """The scores of a rollout, some of them replaced."""
        return scores

    def arrays(
        self, rollout: Rollout, mask: jax.Array, models: Models, how: 'Learning'
    ) -> dict[str, jax.Array]:
        """Arrays for Batch.extra; mask bool [B, T]: the trained tokens."""
        return {}

    def reads(self, batch: Batch) -> jax.Array:
        """bool [B, T]: the tokens at which loss() is computed."""
        return batch.mask

    def loss(
        self,
        forward: Forward,
        batch: Batch,
        weights: jax.Array,
        total: jax.Array | int,
        models: Models,
        how: 'Learning',
    ) -> tuple[jax.Array | float, dict[str, jax.Array]]:
        """(term of the loss, sums of METRICS) of a micro-batch.

        Of the optimiser batch that it is a part of: weights float32 [B, T] (losses.token_weights),
        and total, its number of tokens of reads().
        """
        return 0.0, {}


@dataclasses.dataclass(frozen=True)
class Learning:
    """All that an update depends on beside arrays: one static argument of jit."""

    algorithm: Algorithm
    batch: Batching = Batching()
    critic: Critic = Critic()
    sampler: Sampler = Sampler()
    optim: Optim = Optim()
    num_groups: int = 1
    group_size: int = 1
    max_turns: int = 1
    max_response: int | None = None  # sampled tokens of a turn at most; None = any number
    temperature: float = 1.0
    base_rows: int = 0  # demonstrations among the rows of the batch
    context: Context | Branches | None = None  # what the policy sees; None = all of an episode
    has_reference: bool = False
    extras: tuple[Extra, ...] = ()  # of extensions
    bits: Bits | None = None  # of a grammar
    layout: NamedSharding | None = None  # of rows over the mesh

    @property
    def head(self) -> dict[str, Any]:
        """Keywords of everything that computes log-probabilities of a batch."""
        # No row can have more tokens to train, but demonstrations; with a window a row is a turn.
        turns = self.context.turns_of_row(self.max_turns) if self.context else self.max_turns
        any_number = self.base_rows or not self.max_response
        return dict(
            temperature=self.temperature,
            chunk_size=self.batch.head_chunk,
            row_tokens=None if any_number else self.max_response * turns,
            bits=self.bits,
        )

    @property
    def rows_per_episode(self) -> int:
        """Rows of the batch for an episode, windows included."""
        rows = self.algorithm.rows_per_episode(self.max_turns)
        return rows * (self.context.rows(self.max_turns) if self.context else 1)

    @property
    def microbatches(self) -> int:
        """Slices of an optimiser step."""
        rows = self.rows_per_episode * self.batch.minibatch_rows
        return rows // self.batch.microbatch_rows

    @property
    def sparse(self) -> bool:
        """Whether rows may have nothing to train: groups not kept, turns not played."""
        order = self.algorithm.filter.order(self.num_groups)
        several = self.algorithm.rows_per_episode(self.max_turns) > 1
        return several or order == 'kept_first' or self.context is not None
