"""Weights of GGUF files: sizes from the metadata, tensors dequantised row by row."""

import dataclasses
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from agentrl_jax.machine import gguf_file
from agentrl_jax.models import FAMILIES, Model
from agentrl_jax.models.fields import FIELDS, check_layers, stored_shapes

BLOCK_ELEMENTS = 1 << 24  # dequantised at a time; bounds the temporaries of K-quants


class GGUFSource:
    """The tensors of one .gguf file under HuggingFace's names and in its layout ([out, in])."""

    def __init__(self, path: Path):
        self.path = path
        self._fields, tensors = gguf_file.read(path)
        self.config_name = f'{path.name} metadata'
        self._architecture = self._fields.get('general.architecture')
        if self._architecture not in list(FAMILIES):
            raise ValueError(
                f'{path}: architecture {reprlib.repr(self._architecture)} is not supported '
                f'({", ".join(FAMILIES)})'
            )
        self._check_supported(tensors)
        self._model = self._read_model(tensors)
        architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        stored = gguf.get_tensor_name_map(architectures[self._architecture], self._model.num_layers)
        hf_names = {
            stored.get_name(name, ('.weight', '.bias')): name
            for name in stored_shapes(self._model.abstract_params())
        }
        self._tensors = {hf_names.get(name, name): tensor for name, tensor in tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def _metadata(self, name: str, default: Any) -> Any:
        """Return a field of the architecture, such as qwen2.block_count."""
        return self._fields.get(f'{self._architecture}.{name}', default)

    def _size(self, name: str, default: Any = None) -> Any:
        """Return and check a number of FIELDS; ValueError if it is absent without a default."""
        field = FIELDS[name]
        called = f'{self.path}: {self._architecture}.{field.gguf}'
        return field.check(self._metadata(field.gguf, default), called)

    def _check_supported(self, tensors: Collection[str]) -> None:
        if self._fields.get('split.count', 1) not in (0, 1):
            raise ValueError(f'{self.path}: one of several split files; merge them into one first')
        if self._metadata('expert_count', 0):
            raise ValueError(f'{self.path}: mixtures of experts are not supported')
        scaling = self._metadata('rope.scaling.type', 'none')
        if scaling != 'none':
            raise ValueError(f'{self.path}: rope scaling {reprlib.repr(scaling)} is not supported')
        if 'rope_freqs.weight' in tensors:
            raise ValueError(
                f'{self.path}: rope_freqs.weight (rescaled rotary frequencies, Llama 3.1 and later)'
                ' is not supported; use the HuggingFace folder of the model'
            )
        if 'token_embd.weight' not in tensors:
            raise ValueError(f'{self.path}: tensor token_embd.weight missing')

    def _read_model(self, tensors: Mapping[str, gguf_file.Tensor]) -> Model:
        names = ('hidden_size', 'intermediate_size', 'num_layers', 'num_heads', 'rms_norm_eps')
        sizes = {name: self._size(name) for name in names}
        heads = sizes['num_heads']
        head_dim = self._size('head_dim', sizes['hidden_size'] // heads)
        if self._metadata('rope.dimension_count', head_dim) != head_dim:
            raise ValueError(f'{self.path}: rotary positions on part of a head are not supported')
        check_layers(sizes['num_layers'], tensors, str(self.path))
        family = FAMILIES[self._architecture]
        try:
            return family(
                **sizes,
                vocab_size=tensors['token_embd.weight'].shape[0],
                num_kv_heads=self._size('num_kv_heads', heads),
                head_dim=head_dim,
                rope_theta=self._size('rope_theta', 10000.0),
                tie_embeddings='output.weight' not in tensors,
                **family.options(self._architecture, {}),
            )
        except ValueError as error:
            raise ValueError(f'{self.path}: {error}') from error

    def config(self, **compute: Any) -> Model:
        """Return the model of the metadata; compute: dtype, remat."""
        return dataclasses.replace(self._model, **compute)

    @property
    def hf_fields(self) -> dict[str, Any]:
        """The config.json fields other than sizes that the metadata contains."""
        fields = {'model_type': self._architecture}
        length, begin = FIELDS['max_position_embeddings'], FIELDS['bos_token_id']
        if self._metadata(length.gguf, None) is not None:
            fields[length.hf] = self._size('max_position_embeddings')
        if begin.gguf in self._fields:
            called = f'{self.path}: {begin.gguf}'
            fields[begin.hf] = begin.check(self._fields[begin.gguf], called)
        return fields

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read part of a tensor in float32; only the requested rows are dequantised."""
        tensor, shape = self._tensors[name], self.shapes[name]
        rows = self._row_order(name, shape)[index[0]]
        if len(shape) == 1:
            return self._dequantize(name, tensor.data)[rows]
        out = np.empty((len(rows), *shape[1:]), np.float32)[:, *index[1:]]
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
        heads = self._model.num_kv_heads if 'k_proj' in name else self._model.num_heads
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
