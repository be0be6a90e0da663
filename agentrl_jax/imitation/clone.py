"""Behaviour cloning: cross-entropy on the answers of demonstrations."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax

from agentrl_jax.machine import sharding
from agentrl_jax.models.functions import ModelFns
from agentrl_jax.rl import losses
from agentrl_jax.rl.masked import masked_sum, positions_of
from agentrl_jax.rl.microbatches import Slices, accumulate
from agentrl_jax.settings.marks import ONE, POSITIVE, SHARE, ZERO
from agentrl_jax.types import Demonstrations, Params

ONE_SLICE = Slices(parts=1, sharding=None)


def clone_loss(
    params: Params,
    batch: Demonstrations,
    *,
    fns: ModelFns,
    head: losses.HeadSettings,
    count: jax.Array | None = None,
) -> jax.Array:
    """Return the sum of -log p over answer tokens / count; None: their number, for a mean."""
    positions = positions_of(batch.attention_mask)
    hidden = fns.hidden(params, batch.tokens, positions, batch.attention_mask)
    logprobs, _ = losses.token_logprobs(
        hidden, fns.head(params), batch.tokens, head, mask=batch.mask
    )
    count = jnp.maximum(batch.mask.sum(), 1) if count is None else count
    return -(masked_sum(logprobs, batch.mask) / count)


def clone(
    params: Params,
    demonstrations: Demonstrations,
    key: jax.Array,
    *,
    fns: ModelFns,
    tx: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    chunk_size: int,
    report: Callable[[int, float], None],
    slices: Slices = ONE_SLICE,
    frozen: Params | None = None,
) -> Params:
    """Run `steps` optimiser steps on random batches and call report(step, loss) after each.

    slices: micro-batches of a step; parameters are sharded for training on the mesh of its
    sharding. frozen: model parameters that are not trained, in addition to the trained params.
    """
    head = losses.HeadSettings(
        chunk_size=chunk_size, row_tokens=int(demonstrations.mask.sum(1).max())
    )
    moments, layout = None, None
    if slices.sharding is not None:  # otherwise the second step could get other shardings than the
        # first and be compiled again
        shapes = (params, jax.eval_shape(tx.init, params))
        layout = sharding.specs(shapes, sharding.TRAIN_RULES, slices.sharding.mesh)
        moments, layout = layout[1], (*layout, None)

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=layout)
    def step(params, opt_state, frozen, data, key):
        rows = jax.random.randint(key, (batch_size,), 0, data.tokens.shape[0])
        batch = jax.tree.map(lambda x: x[rows], data)
        count = jnp.maximum(batch.mask.sum(), 1)  # of the full batch, before it is split

        def loss_fn(params, part):
            return clone_loss({**frozen, **params}, part, fns=fns, head=head, count=count), {}

        (loss, _), gradient = accumulate(loss_fn, params, (batch,), batch.mask, slices)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(tx.init, out_shardings=moments)(params)
    for i in range(steps):
        params, opt_state, loss = step(
            params, opt_state, frozen or {}, demonstrations, jax.random.fold_in(key, i)
        )
        report(i, loss)
    return params


LIMITS = {  # limits of expert demonstrations, and the config sections with the same limits
    'max_turns': 'env',
    'max_actions_per_turn': 'env',
    'max_actions_per_episode': 'env',
    'max_tokens': 'rollout',
}


@dataclasses.dataclass(frozen=True)
class Clone:
    """Behaviour cloning before step 0."""

    file: str = ''  # trajectories to clone (AgentTraj's .json, .jsonl); '' = demonstrations of the
    # environment's expert
    episodes: Annotated[int, ZERO] = 0  # expert demonstrations to clone before step 0; 0 = none
    expert: Literal['world', 'scout'] = 'world'  # player of demonstrations: the environment's
    # expert, or a scout (agentrl_jax.scout), which learns first and needs no solver
    oracle: Annotated[float, SHARE] = 0.5  # share of turns played by the expert, the rest at random
    thoughts: bool = False  # thoughts name the next actions of the expert; False: they are empty
    max_turns: Annotated[int, ZERO] = 0  # limit of expert demonstrations; 0 = env.max_turns. With
    # these four limits set, arms with different episodes can start from one clone
    max_actions_per_turn: Annotated[int, ZERO] = 0  # likewise
    max_actions_per_episode: Annotated[int, ZERO] = 0  # likewise
    max_tokens: Annotated[int, ZERO] = 0  # likewise; 0 = rollout.max_tokens
    steps: Annotated[int, ZERO] = 300  # optimiser steps
    batch: Annotated[int, ONE] = 64  # episodes per step
    microbatch_rows: Annotated[int, ZERO] = 0  # episodes per forward and backward pass; 0 = all of
    # a step
    lr: Annotated[float, POSITIVE] = 1e-3  # initial learning rate; falls linearly to 0
    adapters: bool = False  # with lora.rank: clone with adapters, which are merged before new ones
    # train; False: clone with all parameters

    @property
    def demonstrates(self) -> bool:
        """Whether there are demonstrations, from a file or from the expert."""
        return bool(self.file) or self.episodes > 0

    @property
    def has_limits(self) -> bool:
        """Whether expert demonstrations have other limits than the run's episodes."""
        return any(getattr(self, name) for name in LIMITS)
