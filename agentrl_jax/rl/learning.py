"""Settings of an update and the quantities derived from them."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl.algorithm import Algorithm
from agentrl_jax.rl.losses import HeadSettings
from agentrl_jax.rollout.windows import Context, ConversationSpec, WindowIndex
from agentrl_jax.settings.marks import (
    DECAY,
    ONE,
    POSITIVE,
    SHARE,
    ZERO,
    ConfigName,
    Neutral,
    OnlyIf,
)
from agentrl_jax.text.grammar import Bits
from agentrl_jax.types import Batch, FrozenParams, Params, Rollout, Scores

SECTIONS = ('algorithm', 'batch', 'critic', 'sampler', 'optim')  # of a config, for UpdateSettings
SAMPLER_BOUNDS = {'tis': (0.0, 2.0), 'icepop': (0.5, 5.0)}


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """From the rows of a rollout to optimiser steps."""

    minibatch_rows: Annotated[int, ONE] = 32  # episodes per optimiser step
    microbatch_rows: Annotated[int, ONE] = 8  # episodes per forward and backward pass
    epochs: Annotated[int, ONE] = 1  # passes over a rollout
    shuffle: bool = False  # shuffle the episodes in each pass
    head_chunk: Annotated[int, ONE] = 1024  # tokens per chunk of the output head
    widths: Annotated[int, ONE] = 1  # number of compiled widths, for updates and cloning: rows are
    # sorted by length, and each micro-batch runs in the narrowest width that fits; 1 =
    # rollout.max_tokens only
    prefix_rows: Annotated[int, ONE] = 1  # adjacent rows (a group or a part of one) with a common
    # prefix that an update computes once; batch.shuffle keeps them together. Widths then apply to
    # the rest of a row, after the prefix; 1 = off


@dataclasses.dataclass(frozen=True)
class Critic:
    """The value model, for algorithms with a critic."""

    share_backbone: bool = False  # a value head on the policy instead of a separate model
    warmup_steps: Annotated[int, ZERO] = 0  # initial steps that train only a separate critic
    updates: Annotated[int, ONE] = 1  # optimiser steps of a separate critic per policy step
    freeze_attention: bool = False  # freeze the attention layers of a separate critic
    clip: Annotated[float, ZERO, ConfigName('loss.value_clip')] = 0.5
    # clipping range of values around the old values; 0 = off
    coef: Annotated[float, ZERO, ConfigName('loss.value_coef')] = 1.0
    # weight of the value loss with critic.share_backbone. The loss scales with the squared return:
    # for returns up to 10, use a hundredth of the weight that suits returns up to 1


CORRECTS = OnlyIf(lambda sampler: sampler.corrects, 'loss.sampler_correction=tis or icepop')
FALLS = OnlyIf(lambda optim: optim.schedule != 'constant', 'optim.schedule=linear or cosine')


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Correction of sampler and trainer differences: advantages times pi_trainer / pi_sampler."""

    AT = 'loss.sampler_'
    correction: Literal['off', 'tis', 'icepop'] = 'off'  # tis clips the factor to the bounds,
    # icepop sets it to 0 outside them
    low: Annotated[float | None, SHARE, CORRECTS] = None  # lower bound of the factor (default: tis
    # 0, icepop .5)
    high: Annotated[float | None, ONE, CORRECTS] = None  # upper bound of the factor (default: tis
    # 2, icepop 5)

    @property
    def corrects(self) -> bool:
        return self.correction != 'off'

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = SAMPLER_BOUNDS[self.correction]
        return low if self.low is None else self.low, high if self.high is None else self.high


@dataclasses.dataclass(frozen=True)
class Optim:
    """AdamW with global-norm clipping."""

    lr: Annotated[float, POSITIVE] = 1e-6
    critic_lr: Annotated[float, POSITIVE] = 1e-5
    beta1: Annotated[float, DECAY] = 0.9
    beta2: Annotated[float, DECAY] = 0.999
    weight_decay: Annotated[float, ZERO] = 0.01
    max_grad_norm: Annotated[float, POSITIVE] = 1.0  # maximum global norm of the gradient
    warmup_steps: Annotated[int, ZERO] = 0  # optimiser steps of linear warm-up
    schedule: Literal['constant', 'linear', 'cosine'] = 'constant'  # schedule of both rates after
    # the warm-up
    schedule_steps: Annotated[int, ZERO, Neutral(0), FALLS] = 0
    # optimiser steps until the final rate; required for linear and cosine, so that a longer run
    # does not change the schedule
    final_lr: Annotated[float, SHARE, Neutral(0.0), FALLS] = 0.0
    # final rate of linear and cosine, as a share of the initial rate

    def rate(self, lr: float, every: int = 1) -> optax.ScalarOrSchedule:
        """Return the learning rate, or its schedule over optimiser steps.

        every: optimiser steps per step of the schedule (critic updates per policy step).

        The rate rises linearly to lr over n = warmup_steps. The first step uses lr / n, not 0.
        After the warm-up the rate is constant, or falls to final_lr * lr over schedule_steps,
        linearly or along half a cosine.
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
        """Return the optimiser: a global-norm clip, then AdamW with rate(lr, every)."""
        rate = self.rate(lr, every)
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adamw(rate, b1=self.beta1, b2=self.beta2, weight_decay=self.weight_decay),
        )


class Forward(NamedTuple):
    """The policy's forward pass over a micro-batch."""

    params: Params
    hidden: jax.Array  # [B, T, D]
    logprobs: jax.Array  # float32 [B, T], of the trained tokens; no gradient


class Learner(NamedTuple):
    """Functions of the policy model, parameters that a run never changes, and update settings."""

    fns: ModelFns
    frozen: FrozenParams | None
    settings: 'UpdateSettings'


@dataclasses.dataclass(frozen=True)
class Extra:
    """Hooks of an extension into an update; the defaults add nothing. Must be hashable."""

    METRICS: ClassVar[tuple[str, ...]] = ()  # metrics of loss(), averaged over tokens of reads()

    def score(
        self, rollout: Rollout, scores: Scores, learner: Learner, windows: WindowIndex | None
    ) -> Scores:
        """Return the scores of a rollout, with any of them replaced."""
        return scores

    def arrays(self, rollout: Rollout, mask: jax.Array, learner: Learner) -> dict[str, jax.Array]:
        """Return arrays for Batch.extra; mask bool [B, T]: the trained tokens."""
        return {}

    def reads(self, batch: Batch) -> jax.Array:
        """Return the tokens at which loss() is computed; bool [B, T]."""
        return batch.mask

    def loss(
        self,
        forward: Forward,
        batch: Batch,
        weights: jax.Array,
        total: jax.Array | int,
        learner: Learner,
    ) -> tuple[jax.Array | float, dict[str, jax.Array]]:
        """Return (loss term, sums of METRICS) of a micro-batch.

        weights float32 [B, T]: losses.token_weights of the optimiser batch. total: number of tokens
        of reads() in the optimiser batch.
        """
        return 0.0, {}


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """All settings of an update, as one static argument of jit."""

    algorithm: Algorithm
    batch: BatchSettings = BatchSettings()
    critic: Critic = Critic()
    sampler: Sampler = Sampler()
    optim: Optim = Optim()
    num_groups: int = 1
    group_size: int = 1
    max_turns: int = 1
    max_response: int | None = None  # maximum of sampled tokens per turn; None = no limit
    temperature: float = 1.0
    base_rows: int = 0  # demonstrations among the rows of the batch
    context: Context | ConversationSpec | None = None
    # the policy's context; None = the full episode
    has_reference: bool = False
    extras: tuple[Extra, ...] = ()
    bits: Bits | None = None  # token bits of the grammar
    layout: NamedSharding | None = None  # sharding of rows over the mesh

    @classmethod
    def of(cls, run: Any, **task: Any) -> 'UpdateSettings':
        """Return the settings of a run; task: fields set by its environment and mesh."""
        return cls(
            **{name: getattr(run, name) for name in SECTIONS},
            num_groups=run.rollout.num_groups,
            group_size=run.rollout.group_size,
            max_turns=run.env.max_turns,
            max_response=run.rollout.max_response,
            temperature=run.rollout.temperature,
            base_rows=run.base_rows,
            has_reference=run.algorithm.uses_reference and run.algorithm.COMPARES_REFERENCE,
            **task,
        )

    @property
    def head(self) -> HeadSettings:
        """How log-probabilities of a batch are computed."""
        # row_tokens: only demonstrations can exceed this; with a window, a row is one turn.
        turns = self.context.turns_of_row(self.max_turns) if self.context else self.max_turns
        any_number = self.base_rows or not self.max_response
        return HeadSettings(
            temperature=self.temperature,
            chunk_size=self.batch.head_chunk,
            row_tokens=None if any_number else self.max_response * turns,
            bits=self.bits,
        )

    @property
    def rows_per_episode(self) -> int:
        """Number of batch rows per episode, including windows."""
        rows = self.algorithm.rows_per_episode(self.max_turns)
        return rows * (self.context.rows(self.max_turns) if self.context else 1)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches per optimiser step."""
        rows = self.rows_per_episode * self.batch.minibatch_rows
        return rows // self.batch.microbatch_rows

    @property
    def sparse(self) -> bool:
        """Whether rows may have no trained token: dropped groups, turns not played."""
        order = self.algorithm.filter.order(self.num_groups)
        several = self.algorithm.rows_per_episode(self.max_turns) > 1
        return several or order == 'kept_first' or self.context is not None
