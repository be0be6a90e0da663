"""From a rollout to the Batch of an update: keep groups, score, make the batch."""

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax import context, score
from agentrl_jax.types import Batch, Rollout, TrainState


def prepare(
    state: TrainState,
    ref_params: Any,
    rollout: Rollout,
    task: Any = None,
    *,
    algorithm: Any,
    fns: Any,
    group_size: int,
    settings: dict,
) -> tuple[Batch, jax.Array, jax.Array, dict[str, jax.Array]]:
    """(batch, rows of the rollout int32 [b], their advantages float32 [b, T], filter's metrics).

    settings: 'select' (rollout -> filtering.select), the keywords of 'score' and of 'batch', and
    'window', keywords of context.windows where the policy saw only the last turns (needs the task;
    the batch then has a row for each turn). Advantages are nan in rows that do not train.
    """
    rollout, rows, keep, factors, metrics = settings['select'](rollout)
    seen = None
    if settings['window'] is not None:
        seen = context.windows(task, rollout, **settings['window'])
    scores = score.score(
        state.params, state.critic_params, ref_params, rollout,
        hidden_fn=fns.hidden, head_fn=fns.head, values_fn=fns.values, windows=seen,
        **settings['score'],
    )  # fmt: skip
    batch = algorithm.make_batch(
        rollout, scores, group_size=group_size, keep=keep, kl_coef=state.kl_coef,
        **settings['batch'],
    )  # fmt: skip
    if factors is not None:
        batch = batch.replace(advantages=batch.advantages * factors[:, None])
    metrics['filter/empty'] = (~batch.mask.any()).astype(jnp.float32)
    advantages = jnp.where(batch.mask.any(1, keepdims=True), batch.advantages, jnp.nan)
    return batch if seen is None else context.split_batch(batch, seen), rows, advantages, metrics
