"""The model as pure functions for losses and rollouts."""

import functools
from collections.abc import Callable
from typing import Any

from flax import struct, traverse_util
from jax.sharding import NamedSharding

from agentrl_jax.models import Model, critic, prefixes
from agentrl_jax.types import Params

ATTENTION = 'self_attn'  # HuggingFace's name of a layer's attention


@struct.dataclass
class ModelFns:
    """hidden(params, tokens, positions, attention_mask), head(params),
    values(params, critic_params, tokens, positions, attention_mask), value_head(params, hidden).
    sharing(unit=, room=) returns the same functions for rows with shared prefixes; rest returns
    the columns that these rows need (models.prefixes)."""

    hidden: Callable = struct.field(pytree_node=False)
    head: Callable = struct.field(pytree_node=False)
    values: Callable | None = struct.field(pytree_node=False, default=None)  # None without a critic
    value_head: Callable | None = struct.field(pytree_node=False, default=None)  # for a critic on
    # shared states
    sharing: Callable | None = struct.field(pytree_node=False, default=None)
    rest: Callable = struct.field(pytree_node=False, default=prefixes.rest)


def model_functions(
    config: Model,
    rows: NamedSharding | None,
    *,
    has_critic: bool,
    shares_backbone: bool,
    unit: int = 1,
    room: int = 0,
) -> ModelFns:
    """Return the functions of a model. rows: layout of activation rows on a mesh.

    Values are float32 [B, T]; each is for the prefix up to and including its position (not
    shifted). unit, room: see prefixes.forward, used if unit > 1.
    """
    hidden = functools.partial(config.forward, row_sharding=rows)
    if unit > 1:
        hidden = functools.partial(
            prefixes.forward, config, unit=unit, room=room, row_sharding=rows
        )
    sharing = functools.partial(
        model_functions, config, rows, has_critic=has_critic, shares_backbone=shares_backbone
    )

    def value_head(params, states):
        return critic.value_from_hidden(params['value_head'], states)

    def separate_values(params, critic_params, *batch):
        del params
        return value_head(critic_params, hidden(critic_params['backbone'], *batch))

    def shared_values(params, critic_params, *batch):
        del critic_params
        return value_head(params, hidden(params, *batch))

    fns = ModelFns(hidden=hidden, head=config.head_kernel, sharing=sharing)
    if not has_critic:
        return fns
    if shares_backbone:
        return fns.replace(values=shared_values, value_head=value_head)
    return fns.replace(values=separate_values)


def split_critic(params: Params, *, freeze_attention: bool) -> tuple[Params, Params]:
    """Split a critic into (trained, frozen) parameters; frozen: those below self_attn, or {}.

    With LoRA the frozen parameters are the attention adapters, which then stay without effect.
    """
    if not freeze_attention:
        return params, {}
    trained, frozen = {}, {}
    for path, x in traverse_util.flatten_dict(params).items():
        (frozen if ATTENTION in path else trained)[path] = x
    return traverse_util.unflatten_dict(trained), traverse_util.unflatten_dict(frozen)


def join_critic(trained: Params, kept: Params) -> Params:
    """Join the two parts returned by split_critic."""
    if not kept:
        return trained
    both = traverse_util.flatten_dict(trained) | traverse_util.flatten_dict(kept)
    return traverse_util.unflatten_dict(both)


def on_base(fns: ModelFns, base: Any) -> ModelFns:
    """Return `fns` for parameters without those in `base` (with LoRA, the adapters alone)."""

    def with_base(params):
        return {**base, **params}

    def values(params, critic_params, *rows):
        if critic_params is not None:
            critic_params = critic_params | {'backbone': with_base(critic_params['backbone'])}
        return fns.values(with_base(params), critic_params, *rows)

    return fns.replace(
        hidden=lambda params, *rows: fns.hidden(with_base(params), *rows),
        head=lambda params: fns.head(with_base(params)),
        values=None if fns.values is None else values,
        sharing=None if fns.sharing is None else lambda **how: on_base(fns.sharing(**how), base),
    )


def policy_of(params: Params, base: Params) -> Params:
    """Return the parameters of a rollout: with the base, without a shared value head."""
    return {**base, **{name: part for name, part in params.items() if name != 'value_head'}}
