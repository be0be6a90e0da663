"""GGUF files as a source of weights: sizes from the metadata, tensors dequantised row by row."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from agentrl_jax.models.qwen2 import ModelConfig

ARCHITECTURES = ('qwen2', 'qwen3', 'llama')
BLOCK_ELEMENTS = 1 << 24  # dequantised at a time: bounds the temporaries of the K-quants

_MODULES = {
    'token_embd': 'model.embed_tokens',
    'output_norm': 'model.norm',
    'output': 'lm_head',
}
_LAYER_MODULES = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}


def hf_name(name: str) -> str:
    """HuggingFace's name of a GGUF tensor; unknown names come back as they are."""
    module, _, kind = name.rpartition('.')
    if module in _MODULES:
        return f'{_MODULES[module]}.{kind}'
    parts = module.split('.')
    if len(parts) == 3 and parts[0] == 'blk' and parts[2] in _LAYER_MODULES:
        return f'model.layers.{parts[1]}.{_LAYER_MODULES[parts[2]]}.{kind}'
    return name


class GGUFSource:
    """The tensors of one .gguf file under HuggingFace's names and in its layout ([out, in])."""

    def __init__(self, path: Path):
        self.path = path
        self._reader = _open(path)
        tensors = self._reader.tensors
        self._tensors = {hf_name(t.name): t for t in tensors}
        # GGUF writes the fastest dimension first
        self.shapes = {hf_name(t.name): tuple(int(n) for n in reversed(t.shape)) for t in tensors}
        self.config_name = f'{path.name} metadata'
        self._architecture = self._field('general.architecture')
        if self._architecture not in ARCHITECTURES:
            raise ValueError(
                f'{path}: architecture {self._architecture!r} is not supported '
                f'({", ".join(ARCHITECTURES)})'
            )
        self._refuse_unsupported()

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise ValueError(f'{self.path}: metadata field {name} missing')
        return field.contents()

    def _own(self, name: str, *default: Any) -> Any:
        """Metadata of this architecture, e.g. qwen2.block_count; `default` if it may be absent."""
        name = f'{self._architecture}.{name}'
        if default and name not in self._reader.fields:
            return default[0]
        return self._field(name)

    def _refuse_unsupported(self) -> None:
        if 'split.count' in self._reader.fields and self._field('split.count') > 1:
            raise ValueError(f'{self.path}: one of several split files; merge them into one first')
        if self._own('expert_count', 0):
            raise ValueError(f'{self.path}: mixtures of experts are not supported')
        scaling = self._own('rope.scaling.type', 'none')
        if scaling != 'none':
            raise ValueError(f'{self.path}: rope scaling {scaling!r} is not supported')
        if 'rope_freqs.weight' in self.shapes:
            raise ValueError(
                f'{self.path}: rope_freqs.weight (rescaled rotary frequencies, Llama 3.1 and later)'
                ' is not supported; use the HuggingFace folder of the model'
            )

    def config(self, **compute: Any) -> ModelConfig:
        """Sizes from the metadata; compute: dtype, remat."""
        heads = self._own('attention.head_count')
        kv_heads = self._own('attention.head_count_kv', heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise ValueError(f'{self.path}: head counts that differ by layer are not supported')
        hidden = self._own('embedding_length')
        head_dim = self._own('attention.key_length', hidden // heads)
        if self._own('rope.dimension_count', head_dim) != head_dim:
            raise ValueError(f'{self.path}: rotary positions on part of a head are not supported')
        embedding = self.shapes.get('model.embed_tokens.weight')
        if embedding is None:
            raise ValueError(f'{self.path}: tensor token_embd.weight missing')
        return ModelConfig(
            vocab_size=embedding[0],
            hidden_size=hidden,
            intermediate_size=self._own('feed_forward_length'),
            num_layers=self._own('block_count'),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            tie_embeddings='lm_head.weight' not in self.shapes,
            rope_theta=float(self._own('rope.freq_base', 10000.0)),
            rms_norm_eps=float(self._own('attention.layer_norm_rms_epsilon')),
            qkv_bias=self._architecture == 'qwen2',
            qk_norm=self._architecture == 'qwen3',
            **compute,
        )

    def hf_fields(self) -> dict[str, Any]:
        """What config.json says of a model beside its sizes, as far as the metadata has it."""
        fields = {'model_type': self._architecture}
        if (length := self._own('context_length', None)) is not None:
            fields['max_position_embeddings'] = length
        if 'tokenizer.ggml.bos_token_id' in self._reader.fields:
            fields['bos_token_id'] = self._field('tokenizer.ggml.bos_token_id')
        return fields

    def check_dtype(self, name: str) -> None:
        """Any quantisation the gguf package knows can be read; it raises where it cannot."""

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor in float32; only the rows asked for are dequantised."""
        tensor, shape = self._tensors[name], self.shapes[name]
        rows = self._row_order(name, shape)[index[0]]
        if len(shape) == 1:
            return _dequantize(tensor.data, tensor, self.path)[rows]
        out = np.empty((len(rows), *_sizes(index[1:], shape[1:])), np.float32)
        step = max(BLOCK_ELEMENTS // shape[1], 1)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            out[part] = _dequantize(tensor.data[rows[part]], tensor, self.path)[:, *index[1:]]
        return out

    def _row_order(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Stored row of each row. Llama files hold the channels of q and k heads interleaved,
        (0, h/2, 1, h/2 + 1, ...), for llama.cpp's way of rotating."""
        rows = np.arange(shape[0])
        permuted = name.endswith(('q_proj.weight', 'k_proj.weight'))
        if self._architecture != 'llama' or not permuted:
            return rows
        heads = self._own('attention.head_count')
        if 'k_proj' in name:
            heads = self._own('attention.head_count_kv', heads)
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _sizes(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True))


def _dequantize(data: np.ndarray, tensor: Any, path: Path) -> np.ndarray:
    try:
        return gguf.quants.dequantize(data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f'{path}: tensor {tensor.name} has unsupported type {kind}') from error


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise FileNotFoundError(f'{path}: no such file')
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f'{path}: damaged, half-written or not a GGUF file ({error})') from error
