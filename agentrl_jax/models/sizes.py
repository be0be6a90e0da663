"""Sizes of published models by name, for plans without a checkpoint.

Source: config.json of the Qwen2.5 repositories on the HuggingFace hub; layers, heads and tying also
in table 1 of the technical report (arXiv:2412.15115). Instruct and Coder models have equal sizes.
"""

from typing import Any

from agentrl_jax.models.qwen2 import Qwen2
from agentrl_jax.settings.marks import suggestion

# vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim,
# tie_embeddings
QWEN25 = {
    'Qwen2.5-0.5B': (151936, 896, 4864, 24, 14, 2, 64, True),
    'Qwen2.5-1.5B': (151936, 1536, 8960, 28, 12, 2, 128, True),
    'Qwen2.5-3B': (151936, 2048, 11008, 36, 16, 2, 128, True),
    'Qwen2.5-7B': (152064, 3584, 18944, 28, 28, 4, 128, False),
}


def named(name: str, **compute: Any) -> Qwen2:
    """Return a model of a published size; compute: dtype, remat."""
    if name not in QWEN25:
        close = suggestion(name, QWEN25)
        raise ValueError(f'model {name!r} is not one of {", ".join(QWEN25)}{close}')
    return Qwen2(*QWEN25[name], **compute)
