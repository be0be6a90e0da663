"""OLMo 2: norms after attention and MLP, and over whole projections of queries and keys.

Source: arXiv:2501.00656, section 2.1; transformers' modeling_olmo2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding

from agentrl_jax.models import decoder
from agentrl_jax.models.attention import Visible
from agentrl_jax.models.decoder import MLP, RMSNorm, dense
from agentrl_jax.models.fields import flag


@dataclasses.dataclass(frozen=True)
class Olmo2(decoder.Decoder):
    """Post-norm decoder without biases."""

    GGUF_LAYER = {
        'post_attention_norm': 'post_attention_layernorm',
        'post_ffw_norm': 'post_feedforward_layernorm',
    }

    def layer(self) -> type[nn.Module]:
        return Layer

    @classmethod
    def options(cls, kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
        if flag(hf, 'attention_bias'):
            raise ValueError('config.json: OLMo 2 with attention_bias is not supported')
        return {}

    def to_hf(self, *, generic: bool = False) -> dict[str, Any]:
        return {'model_type': 'olmo2'}


class Layer(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    config: Olmo2
    rows: NamedSharding | None = None  # how rows are laid out on a mesh

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array,
        visible: Visible,
        cached: Any = None,
        where: Any = None,
    ) -> tuple[jax.Array, Any]:
        c = self.config
        norm = dict(eps=c.rms_norm_eps, dtype=c.dtype, scaled_in='float32')
        attention = Attention(c, self.rows, name='self_attn')
        mixed, cached = attention(x, angles, visible, cached, where)
        x = x + RMSNorm(**norm, name='post_attention_layernorm')(mixed)
        x = x + RMSNorm(**norm, name='post_feedforward_layernorm')(MLP(c, name='mlp')(x))
        return x, cached


class Attention(decoder.Attention):
    """Queries and keys are normalised over all heads at once."""

    def project(self, x):
        c = self.config
        norm = dict(eps=c.rms_norm_eps, dtype=c.dtype, scaled_in='float32')
        heads = x.shape[:2] + (-1, c.head_dim)
        q = dense(x, c.num_heads * c.head_dim, 'q_proj', c)
        k = dense(x, c.num_kv_heads * c.head_dim, 'k_proj', c)
        v = dense(x, c.num_kv_heads * c.head_dim, 'v_proj', c).reshape(heads)
        q = RMSNorm(**norm, name='q_norm')(q).reshape(heads)
        k = RMSNorm(**norm, name='k_norm')(k).reshape(heads)
        return q, k, v
