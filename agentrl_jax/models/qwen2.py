"""Qwen2.5, Llama (without biases) and Qwen3 (query and key norms instead of biases).

Source: technical reports of Qwen2.5 (arXiv:2412.15115) and Qwen3 (arXiv:2505.09388), transformers'
modeling_qwen2 and modeling_qwen3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder
from agentrl_jax.models.base import Model
from agentrl_jax.models.decoder import dense
from agentrl_jax.models.fields import flag, number


class Attention(decoder.Attention):
    """Attention with biases, or with norms over each head's queries and keys."""

    def project(self, x):
        c = self.config
        heads = x.shape[:2] + (-1, c.head_dim)
        q = dense(x, c.num_heads * c.head_dim, 'q_proj', c, bias=c.qkv_bias).reshape(heads)
        k = dense(x, c.num_kv_heads * c.head_dim, 'k_proj', c, bias=c.qkv_bias).reshape(heads)
        v = dense(x, c.num_kv_heads * c.head_dim, 'v_proj', c, bias=c.qkv_bias).reshape(heads)
        if c.qk_norm:
            q, k = c.norm('q_norm')(q), c.norm('k_norm')(k)
        return q, k, v


@dataclasses.dataclass(frozen=True)
class Qwen2(Model):
    """Pre-norm decoder with grouped-query attention and SwiGLU."""

    ATTENTION = Attention
    NORMS = ('input_layernorm', ''), ('post_attention_layernorm', '')

    qkv_bias: bool = True  # Qwen2.5; False: Llama and Qwen3
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of queries and keys, before rotation

    def __post_init__(self):
        super().__post_init__()
        if self.qkv_bias and self.qk_norm:
            raise ValueError('qkv_bias and qk_norm cannot both be set')

    @classmethod
    def options(cls, kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
        if kind == 'llama' and flag(hf, 'mlp_bias'):
            raise ValueError('config.json: Llama with mlp_bias is not supported')
        bias = flag(hf, 'attention_bias')
        if kind == 'qwen3' and bias:
            raise ValueError('config.json: Qwen3 with attention_bias is not supported')
        if kind == 'qwen3' and hf:
            number(hf, 'head_dim')  # raises if it is absent
        return dict(qkv_bias=kind == 'qwen2' or bias, qk_norm=kind == 'qwen3')

    def to_hf(self, *, generic: bool = False) -> dict[str, Any]:
        """Return qwen3 with query and key norms, qwen2 with QKV bias, else llama.

        generic: with QKV bias it is written as a llama too. Its attention_bias then includes an
        output bias, which is zero (see hf_folder.is_qwen2).
        """
        if self.qk_norm:
            return {'model_type': 'qwen3'}
        if self.qkv_bias and generic:
            return {'model_type': 'llama', 'attention_bias': True}
        return {'model_type': 'qwen2' if self.qkv_bias else 'llama'}
