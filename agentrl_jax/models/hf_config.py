"""Sizes of a model from HuggingFace's config.json, of type qwen2, qwen3 or llama."""

from typing import Any

from agentrl_jax.models.qwen2 import ModelConfig

KINDS = ('qwen2', 'qwen3', 'llama')


def config_from_hf(hf: dict[str, Any], **compute: Any) -> ModelConfig:
    """ModelConfig of a config.json of one of KINDS; compute: dtype, remat.

    Unsupported variants are rejected.
    """
    kind = hf.get('model_type')
    if kind not in KINDS:
        raise ValueError(f'config.json: model_type {kind!r} is not supported ({", ".join(KINDS)})')
    if hf.get('use_sliding_window'):
        raise ValueError('config.json: use_sliding_window is not supported')
    if hf.get('hidden_act', 'silu') != 'silu':
        raise ValueError(f'config.json: hidden_act {hf["hidden_act"]!r} is not supported (silu)')
    if kind == 'llama' and hf.get('mlp_bias'):
        raise ValueError('config.json: Llama with mlp_bias is not supported')
    if kind == 'qwen3' and hf.get('attention_bias'):
        raise ValueError('config.json: Qwen3 with attention_bias is not supported')
    if kind == 'qwen3' and not hf.get('head_dim'):
        raise ValueError('config.json: head_dim missing')
    absent = [name for name in _HF_SIZES if name not in hf]
    if absent:
        raise ValueError(f'config.json: {", ".join(absent)} missing')
    theta, scaling = _rope_from_hf(hf)
    # HuggingFace writes null (or, in older files, nothing) where the size follows from the others.
    kv_heads = hf.get('num_key_value_heads') or hf['num_attention_heads']
    head_dim = hf.get('head_dim') or hf['hidden_size'] // hf['num_attention_heads']
    return ModelConfig(
        vocab_size=hf['vocab_size'],
        hidden_size=hf['hidden_size'],
        intermediate_size=hf['intermediate_size'],
        num_layers=hf['num_hidden_layers'],
        num_heads=hf['num_attention_heads'],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tie_embeddings=bool(hf.get('tie_word_embeddings', False)),
        rope_theta=theta,
        rms_norm_eps=hf['rms_norm_eps'],
        qkv_bias=kind == 'qwen2' or bool(hf.get('attention_bias')),
        qk_norm=kind == 'qwen3',
        rope_scaling=scaling,
        **compute,
    )


_HF_SIZES = (
    'vocab_size',
    'hidden_size',
    'intermediate_size',
    'num_hidden_layers',
    'num_attention_heads',
    'rms_norm_eps',
)
_LLAMA3 = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def _rope_from_hf(hf: dict[str, Any]) -> tuple[float, tuple | None]:
    """(theta, Llama 3 scaling or None); transformers 5 nests both in rope_parameters."""
    nested = hf.get('rope_parameters')
    rope = dict(nested or hf.get('rope_scaling') or {})
    theta = rope['rope_theta'] if 'rope_theta' in rope else hf.get('rope_theta')
    if theta is None:
        raise ValueError('config.json: rope_theta missing')
    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind == 'default':
        return float(theta), None
    if kind != 'llama3':
        raise ValueError(f'config.json: rope type {kind!r} is not supported (default, llama3)')
    if absent := [name for name in _LLAMA3 if rope.get(name) is None]:
        raise ValueError(f'config.json: {", ".join(absent)} of its rope type llama3 missing')
    return float(theta), tuple(float(rope[name]) for name in _LLAMA3)
