"""Conversion between HuggingFace's config.json and models."""

import reprlib
from typing import Any

from agentrl_jax.models import FAMILIES, Model
from agentrl_jax.models.fields import FIELDS, flag, number

_SIZES = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_layers', 'num_heads')
_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_length')


def config_from_hf(hf: dict[str, Any], **compute: Any) -> Model:
    """Return the model of a config.json of one of FAMILIES; compute: dtype, remat.

    Raise ValueError for unsupported variants.
    """
    kind = hf.get('model_type')
    if kind not in list(FAMILIES):
        raise ValueError(
            f'config.json: model_type {reprlib.repr(kind)} is not supported ({", ".join(FAMILIES)})'
        )
    if flag(hf, 'use_sliding_window'):
        raise ValueError('config.json: use_sliding_window is not supported')
    if (act := hf.get('hidden_act')) not in (None, 'silu'):
        raise ValueError(f'config.json: hidden_act {reprlib.repr(act)} is not supported (silu)')
    options = FAMILIES[kind].options(kind, hf)
    theta, scaling = _rope_from_hf(hf)
    sizes = {name: number(hf, name) for name in (*_SIZES, 'rms_norm_eps')}
    # HuggingFace writes null (older files omit the field) for sizes that follow from other sizes.
    heads = sizes['num_heads']
    return FAMILIES[kind](
        **sizes,
        num_kv_heads=number(hf, 'num_kv_heads', heads),
        head_dim=number(hf, 'head_dim', sizes['hidden_size'] // heads),
        tie_embeddings=flag(hf, 'tie_embeddings'),
        rope_theta=theta,
        rope_scaling=scaling,
        **options,
        **compute,
    )


def _rope_from_hf(hf: dict[str, Any]) -> tuple[float, tuple | None]:
    """Return (theta, Llama 3 scaling or None); transformers 5 nests both in rope_parameters."""
    rope = hf.get('rope_parameters') or hf.get('rope_scaling') or {}
    if not isinstance(rope, dict):
        raise ValueError(
            f'config.json: rope_scaling is {reprlib.repr(rope)} and must be an object or null'
        )
    where = hf if rope.get('rope_theta') is None else rope
    theta = number(where, 'rope_theta', 10_000.0)  # transformers' default
    kind = rope.get('rope_type') or rope.get('type')
    if kind in (None, 'default'):
        return theta, None
    if kind != 'llama3':
        raise ValueError(
            f'config.json: rope type {reprlib.repr(kind)} is not supported (default, llama3)'
        )
    scaling = tuple(number(rope, name) for name in _LLAMA3)
    if scaling[1] >= scaling[2]:
        raise ValueError('config.json: low_freq_factor must be below high_freq_factor')
    return theta, scaling


def config_to_hf(config: Model, *, dtype: str, generic: bool = False) -> dict[str, Any]:
    """Return the config.json of a model. generic: the tokenizer is not the family's own."""

    def fields(*names):
        return {FIELDS[name].hf: getattr(config, name) for name in names}

    family = config.to_hf(generic=generic)
    kind = family.pop('model_type')
    hf = {'architectures': [f'{kind.capitalize()}ForCausalLM'], 'model_type': kind}
    hf |= fields(*_SIZES)
    hf |= fields('num_kv_heads', 'head_dim') | {'hidden_act': 'silu'}
    hf |= fields('rms_norm_eps', 'rope_theta', 'tie_embeddings') | {'torch_dtype': dtype, **family}
    if config.rope_scaling is not None:
        names, (*factors, length) = (FIELDS[name].hf for name in _LLAMA3), config.rope_scaling
        scaling = dict(zip(names, (*factors, int(length)), strict=True))
        hf['rope_scaling'] = {'rope_type': 'llama3', **scaling}
    return hf
