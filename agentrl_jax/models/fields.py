"""Names, types and bounds of the tensors, sizes and constants in model files.

A number from config.json or GGUF metadata becomes a shape, a loop length or a divisor. The bounds
are far beyond any existing model, but tight enough that no value within them overflows.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import pydantic

from agentrl_jax.machine import files, sharding
from agentrl_jax.types import Params

LAYER = re.compile(r'(?:model\.layers|blk)\.(\d+)\.')  # in HuggingFace folders, or GGUF files


class Field(NamedTuple):
    """A number (int or float) or a flag (bool) in a file."""

    hf: str  # name in config.json, '' = absent
    gguf: str  # name in GGUF metadata, below the architecture
    kind: type
    low: float = 0
    high: float = 1

    def check(self, value: Any, called: str) -> Any:
        """Return the value as its kind; ValueError for other types and values out of bounds.

        called: the file and the field's name in it, for the message.
        """
        bounds = {} if self.kind is bool else {'ge': self.low, 'le': self.high}
        kind = Annotated[self.kind, pydantic.Strict(), pydantic.Field(**bounds)]
        return files.read_as(kind, value, called)


FIELDS = {  # by names of Model's fields, then others
    'vocab_size': Field('vocab_size', '', int, 1, 2**22),
    'hidden_size': Field('hidden_size', 'embedding_length', int, 1, 2**18),
    'intermediate_size': Field('intermediate_size', 'feed_forward_length', int, 1, 2**20),
    'num_layers': Field('num_hidden_layers', 'block_count', int, 1, 2**12),
    'num_heads': Field('num_attention_heads', 'attention.head_count', int, 1, 2**12),
    'num_kv_heads': Field('num_key_value_heads', 'attention.head_count_kv', int, 1, 2**12),
    'head_dim': Field('head_dim', 'attention.key_length', int, 2, 2**12),
    'tie_embeddings': Field('tie_word_embeddings', '', bool),
    'rope_theta': Field('rope_theta', 'rope.freq_base', float, 1.0, 1e12),
    'rms_norm_eps': Field('rms_norm_eps', 'attention.layer_norm_rms_epsilon', float, 1e-20, 1.0),
    'attention_bias': Field('attention_bias', '', bool),
    'mlp_bias': Field('mlp_bias', '', bool),
    'use_sliding_window': Field('use_sliding_window', '', bool),
    'factor': Field('factor', '', float, 1.0, 1e6),  # this and the next three: Llama 3's rope type
    'low_freq_factor': Field('low_freq_factor', '', float, 1e-6, 1e6),
    'high_freq_factor': Field('high_freq_factor', '', float, 1e-6, 1e6),
    'original_length': Field('original_max_position_embeddings', '', float, 1, 2**31),
    'max_position_embeddings': Field('max_position_embeddings', 'context_length', int, 1, 2**31),
    'bos_token_id': Field('bos_token_id', 'tokenizer.ggml.bos_token_id', int, 0, 2**22),
}


def number(part: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return and check a number of FIELDS; the default if null or absent.

    Raises ValueError if there is no default.
    """
    field = FIELDS[name]
    value = part.get(field.hf)
    return field.check(default if value is None else value, f'config.json: {field.hf}')


def flag(hf: Mapping[str, Any], name: str) -> bool:
    """Return and check a flag of FIELDS; False if null or absent."""
    return number(hf, name, default=False)


def check_layers(layers: int, tensors: Iterable[str], called: str) -> None:
    """Raise ValueError for far more layers than have tensors, before anything is built per layer.

    called: the file. Missing tensors of a layer are reported later, by name.
    """
    present = len({match[1] for match in map(LAYER.match, tensors) if match})
    if layers > 2 * present + 2:
        raise ValueError(f'{called} announces {layers} layers, but only {present} have tensors')


def hf_name(path: str) -> str:
    """'model/layers_0/mlp/up_proj/kernel' -> 'model.layers.0.mlp.up_proj.weight'.

    .../up_proj/lora_a -> PEFT's 'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'.
    """
    module, _, kind = path.rpartition('/')
    name = re.sub(r'layers_(\d+)', r'layers.\1', module).replace('/', '.')
    if kind in ('lora_a', 'lora_b'):
        return f'base_model.model.{name}.lora_{kind[-1].upper()}.weight'
    return f'{name}.bias' if kind == 'bias' else f'{name}.weight'


def is_transposed(path: str) -> bool:
    """Return whether a parameter is [in, out] here and [out, in] in files: kernels and adapters."""
    return path.endswith(('/kernel', '/lora_a', '/lora_b'))


def stored_shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, by name, as HuggingFace stores it."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    shapes = {sharding.path_name(path): leaf.shape for path, leaf in leaves}
    return {
        hf_name(path): shape[::-1] if is_transposed(path) else shape
        for path, shape in shapes.items()
    }
