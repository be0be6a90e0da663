"""Load the weights of a HuggingFace folder or .gguf file, tensor by tensor, onto their devices.

Each device receives only its slice of each tensor, and the host holds one tensor at a time.
Parameters are float32 masters; bfloat16 and float16 tensors are widened without loss.
"""

import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from agentrl_jax.machine import files, sharding
from agentrl_jax.models import Model, adapters
from agentrl_jax.models.fields import check_layers, hf_name, is_transposed, stored_shapes
from agentrl_jax.models.gguf import GGUFSource
from agentrl_jax.models.hf_config import config_from_hf
from agentrl_jax.types import Params

DTYPES = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16'}  # safetensors' names
INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
IGNORED = re.compile(r'rotary_emb\.inv_freq$')  # a constant in old Llama folders
FILE_NAME = re.compile(r'[\w.-]{1,200}\.safetensors')
LISTED = 5  # names listed in an error
EMBEDDING, HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
COMPARED_ROWS = 4096  # rows of a tensor compared at a time


def open_source(path: str | Path) -> Any:
    """Open a .gguf file or HuggingFace folder, reading only sizes.

    A folder with a PEFT adapter is opened as its base model with the adapter merged.
    """
    path = Path(path)
    if adapters.is_adapter(path):
        return adapters.AdapterSource(path, SafetensorsSource(adapters.base_of(path)))
    return GGUFSource(path) if path.suffix == '.gguf' else SafetensorsSource(path)


def load_model(
    path: str | Path, *, mesh: jax.sharding.Mesh | None = None, **compute: Any
) -> tuple[Model, Params]:
    """Load (sizes, float32 parameters) from a HuggingFace folder or .gguf file.

    With a mesh, parameters get their training layout; without one, they go to the default device.
    compute: dtype and remat of the model. Anything that does not fit raises one error that names
    the file or tensor.
    """
    source = open_source(path)
    config = source.config(**compute)
    abstract = config.abstract_params()
    check_tensors(source, abstract, config.tie_embeddings)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        layout = jax.tree.map(lambda _: device, abstract)
    else:
        layout = sharding.specs(abstract, sharding.TRAIN_RULES, mesh)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf, at: _place(source, sharding.path_name(path), leaf.shape, at),
        abstract,
        layout,
    )
    check_finite(params, source.path)
    return config, params


@jax.jit
def _finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def check_finite(params: Params, source: Any) -> None:
    """Raise ValueError naming the parameters that contain nan or infinity.

    One pass over each array on its devices; every process gets the same result. source: for errors.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    finite = jax.device_get([_finite(leaf) for _, leaf in leaves])
    paths = [sharding.path_name(path) for path, _ in leaves]
    broken = [hf_name(path) for path, ok in zip(paths, finite, strict=True) if not ok]
    if broken:
        raise ValueError(
            f'{source}: nan or infinity in {len(broken)} of {len(leaves)} tensors: '
            f'{_listed(broken)}. Use a checkpoint with finite weights'
        )


def _place(source: Any, path: str, shape: tuple[int, ...], at: jax.sharding.Sharding) -> jax.Array:
    """Load one parameter slice by slice; devices with equal slices share one read."""
    name, flip = hf_name(path), is_transposed(path)
    read = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = str(index)
        if key not in read:
            stored = source.read(name, index[::-1] if flip else index)
            read[key] = np.ascontiguousarray(stored.T if flip else stored, np.float32)
        return read[key]

    return jax.make_array_from_callback(shape, at, part)


def check_tensors(source: Any, abstract: Params, tied: bool) -> None:
    """Check that the source has exactly the model's tensors, with their shapes and known types."""
    expected = stored_shapes(abstract)
    shapes = {name: shape for name, shape in source.shapes.items() if not IGNORED.search(name)}
    if tied and HEAD in shapes:
        if not _is_embedding(source):
            raise ValueError(
                f'{source.path}: {source.config_name} ties the output head to the '
                f'embedding (tie_word_embeddings), but there is a different tensor {HEAD}; set '
                'tie_word_embeddings to false to use it'
            )
        del shapes[HEAD]
    missing = [name for name in expected if name not in shapes]
    if not tied and missing == [HEAD]:
        raise ValueError(
            f'{source.path}: tensor {HEAD} missing, and {source.config_name} does not tie the '
            'output head to the embedding (tie_word_embeddings)'
        )
    if missing:
        raise ValueError(f'{source.path}: tensors missing: {_listed(missing)}')
    extra = [name for name in shapes if name not in expected]
    if extra:
        raise ValueError(f'{source.path}: tensors that the model does not have: {_listed(extra)}')
    for name, shape in expected.items():
        if tuple(shapes[name]) != tuple(shape):
            raise ValueError(
                f'{source.path}: tensor {name} has shape {tuple(shapes[name])}, '
                f'{source.config_name} requires {tuple(shape)}'
            )


def _is_embedding(source: Any) -> bool:
    """Return whether lm_head.weight copies the embedding (as in Qwen3-0.6B), block by block."""
    shape = source.shapes[HEAD]
    if len(shape) != 2 or shape != source.shapes.get(EMBEDDING):
        return False
    starts = range(0, shape[0], COMPARED_ROWS)
    blocks = [slice(at, min(at + COMPARED_ROWS, shape[0])) for at in starts]
    return all(
        np.array_equal(source.read(HEAD, (rows,)), source.read(EMBEDDING, (rows,)))
        for rows in blocks
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(map(files.one_line_excerpt, names))
    more = f' and {len(names) - LISTED} more' if len(names) > LISTED else ''
    return ', '.join(names[:LISTED]) + more


class SafetensorsSource:
    """The tensors of a HuggingFace folder: model.safetensors, or several files with an index."""

    config_name = 'config.json'

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise FileNotFoundError(
                f'{path}: no such folder, and not a .gguf file. Download a model with hf download '
                f'<owner>/<name> --local-dir {path}'
            )
        self.hf_fields = files.read_object(path / 'config.json')  # all, including unknown ones
        if self.hf_fields.get('quantization_config') is not None:
            raise ValueError(f'{path / "config.json"}: quantised weights are not supported')
        self._files = {}  # tensor name -> open file
        self.shapes = {}
        for file in self._weight_files():
            handle = _open(file)
            for name in handle.keys():  # noqa: SIM118  (the handle is not a dict)
                self._files[name] = handle
                tensor = handle.get_slice(name)
                self.shapes[name] = tuple(tensor.get_shape())
                if tensor.get_dtype() not in DTYPES:
                    raise ValueError(
                        f'{path}: tensor {files.one_line_excerpt(name)} has type '
                        f'{tensor.get_dtype()}, not one of {", ".join(DTYPES)}'
                    )
        self._drop_zero_biases()

    def _drop_zero_biases(self) -> None:
        """Drop the all-zero o_proj biases of a Llama with attention_bias; others raise ValueError.

        Exports write these zeros for Qwen2.5 models with a different kind of tokenizer (export.py).
        """
        if self.hf_fields.get('model_type') != 'llama' or not self.hf_fields.get('attention_bias'):
            return
        for name in [name for name in self.shapes if name.endswith('self_attn.o_proj.bias')]:
            if len(self.shapes[name]) != 1 or self.read(name, (slice(None),)).any():
                raise ValueError(
                    f'{self.path}: attention_bias with a {files.one_line_excerpt(name)} other than '
                    'zero is not supported'
                )
            del self.shapes[name], self._files[name]

    def _weight_files(self) -> list[Path]:
        if (self.path / SINGLE).is_file():  # first, as in transformers: the index may be stale
            return [self.path / SINGLE]
        if (self.path / INDEX).is_file():
            index = files.read_object(self.path / INDEX)
            if not isinstance(index.get('weight_map'), dict):
                raise ValueError(f'{self.path / INDEX}: no weight_map')
            for name in index['weight_map'].values():
                if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                    raise ValueError(
                        f'{self.path / INDEX}: weight_map has {reprlib.repr(name)}, which is not '
                        'the name of a .safetensors file in the same folder'
                    )
            return [self.path / name for name in sorted(set(index['weight_map'].values()))]
        raise FileNotFoundError(f'{self.path}: neither {SINGLE} nor {INDEX}')

    def config(self, **compute: Any) -> Model:
        """Return the model of config.json; compute: dtype, remat."""
        try:
            config = config_from_hf(self.hf_fields, **compute)
        except ValueError as error:
            raise ValueError(f'{self.path}: {error}') from error
        check_layers(config.num_layers, self.shapes, f'{self.path}: config.json')
        return config

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read part of a tensor in its stored dtype."""
        return self._files[name].get_slice(name)[index]


def _open(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f'{file}: no such file, but {INDEX} names it')
    try:
        return safetensors.safe_open(file, framework='numpy')
    except safetensors.SafetensorError as error:
        why = files.one_line_excerpt(str(error))
        raise ValueError(f'{file}: damaged or half-written ({why})') from error
