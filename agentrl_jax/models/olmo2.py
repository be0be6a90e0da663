"""OLMo 2: norms after attention and MLP, and over full query and key projections.

Source: arXiv:2501.00656, section 2.1; transformers' modeling_olmo2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentrl_jax.models import decoder
from agentrl_jax.models.base import Model
from agentrl_jax.models.decoder import dense
from agentrl_jax.models.fields import flag


class Attention(decoder.Attention):
    """Attention with queries and keys normalised over all heads together."""

    def project(self, x):
        c = self.config
        heads = x.shape[:2] + (-1, c.head_dim)
        q = dense(x, c.num_heads * c.head_dim, 'q_proj', c)
        k = dense(x, c.num_kv_heads * c.head_dim, 'k_proj', c)
        v = dense(x, c.num_kv_heads * c.head_dim, 'v_proj', c).reshape(heads)
        q = c.norm('q_norm')(q).reshape(heads)
        k = c.norm('k_norm')(k).reshape(heads)
        return q, k, v


@dataclasses.dataclass(frozen=True)
class Olmo2(Model):
    """Post-norm decoder without biases."""

    ATTENTION = Attention
    NORMS = ('', 'post_attention_layernorm'), ('', 'post_feedforward_layernorm')
    SCALED_IN = 'float32'

    @classmethod
    def options(cls, kind: str, hf: Mapping[str, Any]) -> dict[str, Any]:
        if flag(hf, 'attention_bias'):
            raise ValueError('config.json: OLMo 2 with attention_bias is not supported')
        return {}

    def to_hf(self, *, generic: bool = False) -> dict[str, Any]:
        return {'model_type': 'olmo2'}
