"""The model as the pure functions that losses and rollouts take."""

import functools
from collections.abc import Callable
from typing import Any

from flax import struct, traverse_util
from jax.sharding import NamedSharding

from agentrl_jax.models import Model, critic, prefixes
from agentrl_jax.types import Params

ATTENTION = 'self_attn'  # of a layer, in the names of HuggingFace


@struct.dataclass
class ModelFns:
    """hidden(params, tokens, positions, attention_mask), head(params),
    values(params, critic_params, tokens, positions, attention_mask), value_head(params, hidden);
    sharing(unit=, room=) -> the same of rows that begin alike, and rest, the columns that those
    need (models.prefixes)."""

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
    """The functions of a model of these sizes; rows: how rows of activations are laid out.

    Values are of the prefix up to and including each position (not shifted), float32 [B, T].
    unit, room: as in prefixes.forward, where more than one row may begin alike.
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

    def own_values(params, critic_params, *batch):
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
    return fns.replace(values=own_values)


def split_critic(params: Params, *, freeze_attention: bool) -> tuple[Params, Params]:
    """(what is trained, what stays) of a critic: all and {}, or without what is below self_attn.

    Of LoRA the adapters of attention stay, and so correct nothing.
    """
    if not freeze_attention:
        return params, {}
    trained, kept = {}, {}
    for path, x in traverse_util.flatten_dict(params).items():
        (kept if ATTENTION in path else trained)[path] = x
    return traverse_util.unflatten_dict(trained), traverse_util.unflatten_dict(kept)


def join_critic(trained: Params, kept: Params) -> Params:
    """The critic of which split_critic made two."""
    if not kept:
        return trained
    both = traverse_util.flatten_dict(trained) | traverse_util.flatten_dict(kept)
    return traverse_util.unflatten_dict(both)


def on_base(fns: ModelFns, base: Any) -> ModelFns:
    """The functions for parameters that lack those in `base` (LoRA: all but the adapters)."""

    def whole(params):
        return {**base, **params}

    def values(params, critic_params, *rows):
        if critic_params is not None:
            critic_params = critic_params | {'backbone': whole(critic_params['backbone'])}
        return fns.values(whole(params), critic_params, *rows)

    return fns.replace(
        hidden=lambda params, *rows: fns.hidden(whole(params), *rows),
        head=lambda params: fns.head(whole(params)),
        values=None if fns.values is None else values,
        sharing=None if fns.sharing is None else lambda **how: on_base(fns.sharing(**how), base),
    )


def policy_of(params: Params, base: Params) -> Params:
    """The parameters a rollout needs: with the base, without a value head on a shared backbone."""
    return {**base, **{name: part for name, part in params.items() if name != 'value_head'}}
