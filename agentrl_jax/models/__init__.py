"""Model families by the model_type of config.json (GGUF: general.architecture)."""

from agentrl_jax.models.base import Model
from agentrl_jax.models.olmo2 import Olmo2
from agentrl_jax.models.qwen2 import Qwen2

FAMILIES: dict[str, type[Model]] = {'qwen2': Qwen2, 'qwen3': Qwen2, 'llama': Qwen2, 'olmo2': Olmo2}
DRAWN = FAMILIES['qwen2']  # family of models with random weights
