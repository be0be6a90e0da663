"""Read a PEFT LoRA adapter folder as its base model with the adapter merged: W + scale B A."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from agentrl_jax.machine import files

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
TENSOR = re.compile(r'base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight')


def is_adapter(path: Path) -> bool:
    """Return whether a folder contains an adapter and no model."""
    return (path / CONFIG).is_file() and not (path / 'config.json').is_file()


def base_of(path: Path) -> Path:
    """Return the folder of an adapter's base model."""
    file = path / CONFIG
    name = files.read_object(file).get('base_model_name_or_path')
    if not isinstance(name, str) or not name:
        raise ValueError(
            f'{path} is a PEFT adapter, but its {CONFIG} names no base model. Set '
            'base_model_name_or_path to the folder of its base'
        )
    label = files.one_line_excerpt(name)
    if not Path(name).is_dir():
        raise ValueError(
            f'{path} is a PEFT adapter of {label}, which is not a local folder: download it (hf '
            f'download {label} --local-dir FOLDER) and set base_model_name_or_path in {file} to '
            'that folder'
        )
    if is_adapter(Path(name)):
        raise ValueError(f'{path} is a PEFT adapter of {label}, which is an adapter, not a model')
    return Path(name)


class AdapterSource:
    """The tensors of an adapter's base, with the adapter merged slice by slice."""

    config_name = 'config.json'

    def __init__(self, path: Path, base: Any):
        """Read the adapter. base: source of the base model's tensors."""
        self.path, self._base = path, base
        self.shapes, self.hf_fields, self.config = base.shapes, base.hf_fields, base.config
        file, settings = path / WEIGHTS, files.read_object(path / CONFIG)
        if settings.get('peft_type') != 'LORA':
            raise ValueError(f'{path / CONFIG}: only adapters of peft_type LORA are supported')
        for field in ('alpha_pattern', 'fan_in_fan_out'):
            if settings.get(field):
                raise ValueError(f'{path / CONFIG}: {field} is not supported')
        alpha, rooted = settings.get('lora_alpha'), bool(settings.get('use_rslora'))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            raise ValueError(f'{path / CONFIG}: lora_alpha is {alpha!r} and must be a number')
        if not file.is_file():
            raise FileNotFoundError(f'{file}: no such file')
        try:
            tensors = safetensors.numpy.load_file(file)
        except safetensors.SafetensorError as error:
            why = files.one_line_excerpt(str(error))
            raise ValueError(f'{file}: damaged or half-written ({why})') from error
        self._parts: dict[str, dict[str, np.ndarray]] = {}
        for name, tensor in tensors.items():
            match = TENSOR.fullmatch(name)
            target = f'{match[1]}.weight' if match else ''
            if target not in self.shapes:
                raise ValueError(
                    f'{file}: tensor {files.one_line_excerpt(name)} is not a LoRA matrix of a '
                    f'weight of {base.path}'
                )
            self._parts.setdefault(target, {})[match[2]] = tensor.astype(np.float32)
        for target, parts in self._parts.items():
            a, b = parts.get('A'), parts.get('B')
            fits = a is not None and b is not None and a.ndim == b.ndim == 2
            if not fits or (b.shape[0], a.shape[1]) != self.shapes[target] or len(a) != b.shape[1]:
                raise ValueError(
                    f'{file}: the matrices of {files.one_line_excerpt(target)} do not fit it'
                )
            parts['B'] = b * np.float32(alpha / (len(a) ** 0.5 if rooted else len(a)))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read part of a tensor; tensors with an adapter are float32."""
        tensor = self._base.read(name, index)
        if name not in self._parts:
            return tensor
        rows, columns = (*index, slice(None))[:2]
        parts = self._parts[name]
        return tensor.astype(np.float32) + parts['B'][rows] @ parts['A'][:, columns]
