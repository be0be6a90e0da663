"""The critic: a separate backbone with a value head (RAGEN), or a head on the policy's states."""

import jax
import jax.numpy as jnp

from agentrl_jax.models import Model
from agentrl_jax.types import Params


def init_head(config: Model) -> Params:
    """Return a value head that outputs 0, so that the first advantages are plain returns."""
    return {'kernel': jnp.zeros((config.hidden_size, 1)), 'bias': jnp.zeros(1)}


def init(policy_params: Params, config: Model) -> Params:
    """Return a copy of the policy's backbone (with LoRA: of its adapters) and a new head."""
    backbone = {name: policy_params[name] for name in ('model', 'lora') if name in policy_params}
    return {'backbone': jax.tree.map(jnp.copy, backbone), 'value_head': init_head(config)}


def value_from_hidden(head: Params, hidden: jax.Array) -> jax.Array:
    """hidden [B, T, D] -> float32 [B, T]."""
    return hidden.astype(jnp.float32) @ head['kernel'][:, 0] + head['bias'][None]
