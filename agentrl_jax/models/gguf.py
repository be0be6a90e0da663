"""Weights of GGUF files: sizes from the metadata, tensors dequantised row by row."""

import reprlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from agentrl_jax.machine import gguf_file
from agentrl_jax.models import FAMILIES, Model
from agentrl_jax.models.fields import FIELDS, check_layers

BLOCK_ELEMENTS = 1 << 24  # dequantised at a time; bounds the temporaries of K-quants

_MODULES = {
    'token_embd': 'model.embed_tokens',
    'output_norm': 'model.norm',
    'output': 'lm_head',
}
_LAYER = {  # shared by all families; the rest is in Model.GGUF_LAYER
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}


def hf_name(name: str, family: type[Model]) -> str:
    """Return HuggingFace's name of a GGUF tensor; unknown names are returned unchanged."""
    module, _, kind = name.rpartition('.')
    layer = {**_LAYER, **family.GGUF_LAYER}
    if module in _MODULES:
        return f'{_MODULES[module]}.{kind}'
    parts = module.split('.')
    if len(parts) == 3 and parts[0] == 'blk' and parts[2] in layer:
        return f'model.layers.{parts[1]}.{layer[parts[2]]}.{kind}'
    return name


class GGUFSource:
    """The tensors of one .gguf file under HuggingFace's names and in its layout ([out, in])."""

    def __init__(self, path: Path):
        self.path = path
        self._fields, tensors = gguf_file.read(path)
        self.config_name = f'{path.name} metadata'
        self._architecture = self._field('general.architecture')
        if self._architecture not in list(FAMILIES):
            raise ValueError(
                f'{path}: architecture {reprlib.repr(self._architecture)} is not supported '
                f'({", ".join(FAMILIES)})'
            )
        self._family = FAMILIES[self._architecture]
        self._tensors = {hf_name(name, self._family): t for name, t in tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._refuse_unsupported()

    def _field(self, name: str, *default: Any) -> Any:
        if name in self._fields:
            return self._fields[name]
        if not default:
            raise ValueError(f'{self.path}: metadata field {name} missing')
        return default[0]

    def _architecture_field(self, name: str, *default: Any) -> Any:
        """Return architecture metadata, e.g. qwen2.block_count; `default` if it may be absent."""
        return self._field(f'{self._architecture}.{name}', *default)

    def _size(self, name: str, *default: Any) -> Any:
        """Return and check a number by its name in FIELDS."""
        field = FIELDS[name]
        value = self._architecture_field(field.gguf, *default)
        return field.check(value, f'{self.path}: {self._architecture}.{field.gguf}')

    def _refuse_unsupported(self) -> None:
        if self._field('split.count', 1) not in (0, 1):
            raise ValueError(f'{self.path}: one of several split files; merge them into one first')
        if self._architecture_field('expert_count', 0):
            raise ValueError(f'{self.path}: mixtures of experts are not supported')
        scaling = self._architecture_field('rope.scaling.type', 'none')
        if scaling != 'none':
            raise ValueError(f'{self.path}: rope scaling {reprlib.repr(scaling)} is not supported')
        if 'rope_freqs.weight' in self.shapes:
            raise ValueError(
                f'{self.path}: rope_freqs.weight (rescaled rotary frequencies, Llama 3.1 and later)'
                ' is not supported; use the HuggingFace folder of the model'
            )

    def _heads(self) -> tuple[int, int]:
        """Return (query heads, key-value heads)."""
        for name in ('num_heads', 'num_kv_heads'):
            if isinstance(self._architecture_field(FIELDS[name].gguf, 0), list):
                raise ValueError(f'{self.path}: head counts that differ by layer are not supported')
        heads = self._size('num_heads')
        return heads, self._size('num_kv_heads', heads)

    def config(self, **compute: Any) -> Model:
        """Return the model of the metadata; compute: dtype, remat."""
        heads, kv_heads = self._heads()
        names = ('hidden_size', 'intermediate_size', 'num_layers', 'rms_norm_eps')
        sizes = {name: self._size(name) for name in names}
        head_dim = self._size('head_dim', sizes['hidden_size'] // heads)
        if self._architecture_field('rope.dimension_count', head_dim) != head_dim:
            raise ValueError(f'{self.path}: rotary positions on part of a head are not supported')
        embedding = self.shapes.get('model.embed_tokens.weight')
        if embedding is None:
            raise ValueError(f'{self.path}: tensor token_embd.weight missing')
        check_layers(sizes['num_layers'], self.shapes, str(self.path))
        rows = f'{self.path}: rows of token_embd.weight'
        vocab_size = FIELDS['vocab_size'].check(embedding[0], rows)
        theta = self._size('rope_theta', 10000.0)
        try:
            return self._family(
                **sizes,
                vocab_size=vocab_size,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rope_theta=theta,
                tie_embeddings='lm_head.weight' not in self.shapes,
                **self._family.options(self._architecture, {}),
                **compute,
            )
        except ValueError as error:
            raise ValueError(f'{self.path}: {error}') from error

    def hf_fields(self) -> dict[str, Any]:
        """Return the config.json fields other than sizes that the metadata contains."""
        fields = {'model_type': self._architecture}
        length = FIELDS['max_position_embeddings']
        if self._architecture_field(length.gguf, None) is not None:
            fields[length.hf] = self._size('max_position_embeddings')
        begin = FIELDS['bos_token_id']
        if begin.gguf in self._fields:
            called = f'{self.path}: {begin.gguf}'
            fields[begin.hf] = begin.check(self._fields[begin.gguf], called)
        return fields

    def check_dtype(self, name: str) -> None:
        """Accept any type; read() raises for quantisations that the gguf package cannot read."""

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read part of a tensor in float32; only the requested rows are dequantised."""
        tensor, shape = self._tensors[name], self.shapes[name]
        rows = self._row_order(name, shape)[index[0]]
        if len(shape) == 1:
            return self._dequantize(name, tensor.data)[rows]
        out = np.empty((len(rows), *_sizes(index[1:], shape[1:])), np.float32)
        step = max(BLOCK_ELEMENTS // shape[1], 1)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            out[part] = self._dequantize(name, tensor.data[rows[part]])[:, *index[1:]]
        return out

    def _row_order(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the stored row of each row. Llama files interleave the channels of q and k heads,
        (0, h/2, 1, h/2 + 1, ...), for llama.cpp's rotation."""
        rows = np.arange(shape[0])
        permuted = name.endswith(('q_proj.weight', 'k_proj.weight'))
        if self._architecture != 'llama' or not permuted:
            return rows
        heads = self._heads()['k_proj' in name]
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _dequantize(self, name: str, data: np.ndarray) -> np.ndarray:
        """Dequantise bytes uint8 [..., bytes per row] of a tensor to float32."""
        kind = self._tensors[name].kind
        try:
            return gguf.quants.dequantize(data, kind)
        except NotImplementedError as error:
            raise ValueError(
                f'{self.path}: tensor {name} has unsupported type {kind.name}'
            ) from error


def _sizes(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(*i.indices(n))) for i, n in zip(index, shape, strict=True))
