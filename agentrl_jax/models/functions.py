"""The model as the pure functions that losses and rollouts take."""

from collections.abc import Callable
from typing import Any

from flax import struct
from jax.sharding import NamedSharding

from agentrl_jax.models import Model, critic


@struct.dataclass
class ModelFns:
    """hidden(params, tokens, positions, attention_mask), head(params),
    values(params, critic_params, tokens, positions, attention_mask), value_head(params, hidden)."""

    hidden: Callable = struct.field(pytree_node=False)
    head: Callable = struct.field(pytree_node=False)
    values: Callable | None = struct.field(pytree_node=False, default=None)  # None without a critic
    value_head: Callable | None = struct.field(pytree_node=False, default=None)  # for a critic on
    # shared states


def model_functions(
    config: Model,
    rows: NamedSharding | None,
    *,
    has_critic: bool,
    shares_backbone: bool,
) -> ModelFns:
    """The functions of a model of these sizes; rows: how rows of activations are laid out."""

    def hidden(params, tokens, positions, attention_mask):
        return config.forward(params, tokens, positions, attention_mask, row_sharding=rows)

    def head(params):
        return config.head_kernel(params)

    def own_values(params, critic_params, tokens, positions, attention_mask):
        del params
        return critic.values(
            critic_params, config, tokens, positions, attention_mask, row_sharding=rows
        )

    def value_head(params, states):
        return critic.value_from_hidden(params['value_head'], states)

    def shared_values(params, critic_params, tokens, positions, attention_mask):
        del critic_params
        return value_head(params, hidden(params, tokens, positions, attention_mask))

    if not has_critic:
        return ModelFns(hidden=hidden, head=head, values=None, value_head=None)
    if shares_backbone:
        return ModelFns(hidden=hidden, head=head, values=shared_values, value_head=value_head)
    return ModelFns(hidden=hidden, head=head, values=own_values, value_head=None)


def on_base(fns: ModelFns, base: Any) -> ModelFns:
    """The functions for parameters that lack those in `base` (LoRA: all but the adapters)."""

    def whole(params):
        return {**base, **params}

    def values(params, critic_params, *rows):
        if critic_params is not None:
            critic_params = critic_params | {'backbone': whole(critic_params['backbone'])}
        return fns.values(whole(params), critic_params, *rows)

    return ModelFns(
        hidden=lambda params, *rows: fns.hidden(whole(params), *rows),
        head=lambda params: fns.head(whole(params)),
        values=None if fns.values is None else values,
        value_head=fns.value_head,
    )
