"""Base demonstrations and iterations of AgentEvol (arXiv:2406.04151).

D_m u D_base: `draw` samples demonstrations for a step; `demonstration_batch` and `join` mix them
with its episodes. Iterations: `begin_iteration` makes the learnt policy the explorer and restarts
learning. Everything else is an ordinary run of algorithms/agent_evol.py.
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax.settings.marks import ONE, ZERO
from agentrl_jax.types import Batch, Demonstrations, Params, Scores, TrainState


def draw(
    demonstrations: Demonstrations, key: jax.Array, *, rows: int, max_tokens: int, pad_id: int
) -> Demonstrations:
    """Draw `rows` demonstrations, without replacement if there are enough; on the host [rows, T].

    T = max_tokens, the width of a rollout.
    """
    total, width = demonstrations.tokens.shape
    index = np.asarray(jax.random.choice(key, total, (rows,), replace=rows > total))

    def widened(x, fill):
        pad = ((0, 0), (0, max_tokens - width))
        return np.pad(np.asarray(x[index]), pad, constant_values=fill)

    return Demonstrations(
        tokens=widened(demonstrations.tokens, pad_id),
        attention_mask=widened(demonstrations.attention_mask, False),
        mask=widened(demonstrations.mask, False),
    )


def demonstration_batch(base: Demonstrations, scores: Scores) -> Batch:
    """Return the demonstrations as rows of a batch, each with weight 1."""
    zeros = jnp.zeros(base.tokens.shape, jnp.float32)
    return Batch(
        tokens=base.tokens,
        attention_mask=base.attention_mask,
        mask=base.mask,
        value_mask=jnp.zeros_like(base.mask),
        turn=jnp.where(base.attention_mask, 0, -1),
        old_logprobs=jnp.where(base.mask, scores.old_logprobs, 0.0),
        ref_logprobs=jnp.where(base.mask, scores.ref_logprobs, 0.0),
        advantages=base.mask.astype(jnp.float32),
        returns=zeros,
        old_values=zeros,
    )


def join(batch: Batch, other: Batch) -> Batch:
    """Interleave the rows of both batches evenly: any run of rows has its share of each.

    Arrays that extensions added to `batch` are 0 in the rows of `other`.
    """
    sizes = (batch.tokens.shape[0], other.tokens.shape[0])
    other = other.replace(
        extra={n: jnp.zeros((sizes[1], *x.shape[1:]), x.dtype) for n, x in batch.extra.items()}
    )
    place = np.concatenate([(np.arange(n) + 0.5) / n for n in sizes])
    order = np.argsort(place, kind='stable')
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b])[order], batch, other)


def begin_iteration(
    state: TrainState, tx: optax.GradientTransformation, start: Params
) -> TrainState:
    """Make pi_m the explorer and restart learning from `start`."""
    state = state.replace(explorer=jax.tree.map(jnp.copy, state.params))
    layout: Any = jax.tree.map(lambda x: x.sharding, state.opt_state)
    return state.replace(params=start, opt_state=jax.jit(tx.init, out_shardings=layout)(start))


@dataclasses.dataclass(frozen=True)
class AgentEvolSettings:
    """AgentEvol's iterations and base demonstrations (algorithm=agent_evol)."""

    iteration: Annotated[int, ONE] = 50  # steps per iteration; the policy of its first step
    # explores
    base_rows: Annotated[int, ZERO] = 0  # demonstrations (from cfg.clone) added to the episodes of
    # each step
