"""The critic: a backbone of its own with a value head (RAGEN), or a head on the policy's states."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from agentrl_jax.models import Model
from agentrl_jax.types import Params


def init_head(config: Model) -> Params:
    """A value head that says 0: the first advantages are then plain returns."""
    return {'kernel': jnp.zeros((config.hidden_size, 1)), 'bias': jnp.zeros(1)}


def init(policy_params: Params, config: Model) -> Params:
    """A copy of the policy's backbone (with LoRA: of its adapters) and a fresh head."""
    backbone = {name: policy_params[name] for name in ('model', 'lora') if name in policy_params}
    return {'backbone': jax.tree.map(jnp.copy, backbone), 'value_head': init_head(config)}


def value_from_hidden(head: Params, hidden: jax.Array) -> jax.Array:
    """hidden [B, T, D] -> float32 [B, T]."""
    return hidden.astype(jnp.float32) @ head['kernel'][:, 0] + head['bias'][None]


def values(
    params: Params,
    config: Model,
    tokens: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
    *,
    row_sharding: NamedSharding | None = None,
) -> jax.Array:
    """V at each position, of the prefix up to and including it (not shifted). float32 [B, T].

    row_sharding as in Model.forward.
    """
    hidden = config.forward(
        params['backbone'], tokens, positions, attention_mask, row_sharding=row_sharding
    )
    return value_from_hidden(params['value_head'], hidden)
