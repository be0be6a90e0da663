"""Sizes of a model from HuggingFace's config.json, of type qwen2, qwen3 or llama."""

import reprlib
from typing import Any

from agentrl_jax.models.fields import FIELDS
from agentrl_jax.models.qwen2 import ModelConfig

KINDS = ('qwen2', 'qwen3', 'llama')
_SIZES = (
    'vocab_size',
    'hidden_size',
    'intermediate_size',
    'num_layers',
    'num_heads',
    'rms_norm_eps',
)
_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_length')


def config_from_hf(hf: dict[str, Any], **compute: Any) -> ModelConfig:
    """ModelConfig of a config.json of one of KINDS; compute: dtype, remat.

    Unsupported variants are rejected.
    """
    kind = _present(hf, 'model_type')
    if kind not in KINDS:
        raise ValueError(
            f'config.json: model_type {reprlib.repr(kind)} is not supported ({", ".join(KINDS)})'
        )
    if _flag(hf, 'use_sliding_window'):
        raise ValueError('config.json: use_sliding_window is not supported')
    if (act := _present(hf, 'hidden_act')) not in (None, 'silu'):
        raise ValueError(f'config.json: hidden_act {reprlib.repr(act)} is not supported (silu)')
    if kind == 'llama' and _flag(hf, 'mlp_bias'):
        raise ValueError('config.json: Llama with mlp_bias is not supported')
    bias = _flag(hf, 'attention_bias')
    if kind == 'qwen3' and bias:
        raise ValueError('config.json: Qwen3 with attention_bias is not supported')
    needed = (*_SIZES, 'head_dim') if kind == 'qwen3' else _SIZES
    absent = [FIELDS[name].hf for name in needed if _present(hf, FIELDS[name].hf) is None]
    if absent:
        raise ValueError(f'config.json: {", ".join(absent)} missing')
    theta, scaling = _rope_from_hf(hf)
    sizes = {name: _number(hf, name) for name in _SIZES}
    # HuggingFace writes null (or, in older files, nothing) where the size follows from the others.
    heads = sizes['num_heads']
    return ModelConfig(
        **sizes,
        num_kv_heads=_number(hf, 'num_kv_heads', heads),
        head_dim=_number(hf, 'head_dim', sizes['hidden_size'] // heads),
        tie_embeddings=_flag(hf, 'tie_embeddings'),
        rope_theta=theta,
        qkv_bias=kind == 'qwen2' or bias,
        qk_norm=kind == 'qwen3',
        rope_scaling=scaling,
        **compute,
    )


def _present(part: dict[str, Any], name: str) -> Any:
    """A value by its name in the file; None where it is null or absent."""
    return part[name] if name in part else None


def _number(part: dict[str, Any], name: str, default: Any = None) -> Any:
    """A number of FIELDS, checked; the default where it is null or absent."""
    field = FIELDS[name]
    value = _present(part, field.hf)
    return field.check(default if value is None else value, f'config.json: {field.hf}')


def _flag(hf: dict[str, Any], name: str) -> bool:
    """A flag of FIELDS, checked; null or absent is false."""
    return _number(hf, name, default=False)


def _rope_from_hf(hf: dict[str, Any]) -> tuple[float, tuple | None]:
    """(theta, Llama 3 scaling or None); transformers 5 nests both in rope_parameters."""
    rope = {}
    for name in ('rope_scaling', 'rope_parameters'):
        value = _present(hf, name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(
                f'config.json: {name} is {reprlib.repr(value)} and must be an object or null'
            )
        rope = value or rope
    where = rope if 'rope_theta' in rope else hf
    if _present(where, 'rope_theta') is None:
        raise ValueError('config.json: rope_theta missing')
    theta = _number(where, 'rope_theta')
    kind = rope['rope_type'] if 'rope_type' in rope else _present(rope, 'type')
    if kind in (None, 'default'):
        return theta, None
    if kind != 'llama3':
        raise ValueError(
            f'config.json: rope type {reprlib.repr(kind)} is not supported (default, llama3)'
        )
    if absent := [FIELDS[name].hf for name in _LLAMA3 if _present(rope, FIELDS[name].hf) is None]:
        raise ValueError(f'config.json: {", ".join(absent)} of its rope type llama3 missing')
    scaling = tuple(_number(rope, name) for name in _LLAMA3)
    if scaling[1] >= scaling[2]:
        raise ValueError('config.json: low_freq_factor must be below high_freq_factor')
    return theta, scaling
