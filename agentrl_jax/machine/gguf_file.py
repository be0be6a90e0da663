"""A reader of GGUF files that checks every number in the file against the size of the file.

Format: github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian. GGUFReader of the
package `gguf` trusts the file: it allocates arrays of any announced length.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from agentrl_jax.machine.files import one_line_excerpt

MAGIC = b'GGUF'
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, if the file has no general.alignment
MAX_DIMENSIONS = 4
SCALARS = dict(enumerate('BbHhIif?')) | {10: 'Q', 11: 'q', 12: 'd'}  # types of values
STRING, ARRAY = 8, 9


class Tensor(NamedTuple):
    """A tensor, as a view of the file."""

    shape: tuple[int, ...]  # slowest dimension first, as in HuggingFace
    kind: gguf.GGMLQuantizationType
    data: np.ndarray  # uint8 [*shape[:-1], bytes of a row]


class GGUFFile(NamedTuple):
    fields: dict[str, Any]  # metadata: numbers, strings, and lists of them
    tensors: dict[str, Tensor]  # by their names in the file


def read(path: Path) -> GGUFFile:
    """Return metadata and tensors. Raises ValueError with path and reason if the file is damaged.

    Time and memory are proportional to the size of the file. Tensor data are not read yet.
    """
    if not path.is_file():
        raise FileNotFoundError(f'{path}: no such file')
    with open(path, 'rb') as file:
        if not path.stat().st_size:
            raise ValueError(f'{path}: damaged, half-written or not a GGUF file (it is empty)')
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read(_Cursor(content))
    except ValueError as error:  # UnicodeDecodeError is one
        why = one_line_excerpt(str(error))
        raise ValueError(f'{path}: damaged, half-written or not a GGUF file ({why})') from error


class _Cursor:
    """Reads a file sequentially and never past its end."""

    def __init__(self, content: mmap.mmap):
        self.content = content
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.content):
            raise ValueError(f'{count} bytes are expected at byte {self.at} of {len(self.content)}')
        data, self.at = self.content[self.at : end], end
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(f'<{form}', self.take(struct.calcsize(f'<{form}')))[0]

    def text(self) -> str:
        return self.take(self.number('Q')).decode('utf-8')

    def value(self, kind: int) -> Any:
        """Read a metadata value."""
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f'a value of unknown type {kind}')
        kind, count = self.number('I'), self.number('Q')
        if kind == STRING:
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f'an array of unknown type {kind}')
        form = f'<{SCALARS[kind]}'
        values = self.take(count * struct.calcsize(form))
        return [value for (value,) in struct.iter_unpack(form, values)]


def _read(cursor: _Cursor) -> GGUFFile:
    if cursor.take(4) != MAGIC:
        raise ValueError('it does not start with GGUF')
    version = cursor.number('I')
    if version not in VERSIONS:
        raise ValueError(f'version {version} is not one of {VERSIONS}; big-endian is not supported')
    tensor_count, field_count = cursor.number('Q'), cursor.number('Q')
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.text()
        if name in fields:
            raise ValueError(f'metadata field {name} occurs twice')
        fields[name] = cursor.value(cursor.number('I'))
    infos: dict[str, tuple] = {}
    for _ in range(tensor_count):
        name, dimensions = cursor.text(), cursor.number('I')
        if name in infos:
            raise ValueError(f'tensor {name} occurs twice')
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f'tensor {name} has {dimensions} dimensions')
        shape = tuple(cursor.number('Q') for _ in range(dimensions))[::-1]
        infos[name] = shape, cursor.number('I'), cursor.number('Q')
    alignment = fields['general.alignment'] if 'general.alignment' in fields else ALIGNMENT
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f'general.alignment is {alignment!r}, which is not a power of two')
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(fields, _tensors(cursor.content, start, infos))


def _tensors(content: mmap.mmap, start: int, infos: dict[str, tuple]) -> dict[str, Tensor]:
    """Return the tensors. Raises ValueError if they are larger than the file, each or in total.

    start: the byte that their offsets are relative to.
    """
    data = np.frombuffer(content, np.uint8)[start:]
    tensors, total = {}, 0
    for name, (shape, number, offset) in infos.items():
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f'tensor {name} has rows of {shape[-1]}, in blocks of {block}')
        row = shape[-1] // block * block_bytes
        size = math.prod(shape[:-1]) * row
        total += size
        if offset + size > len(data) or total > len(data):
            raise ValueError(f'tensor {name} of {size} bytes does not fit in the file')
        stored = data[offset : offset + size].reshape(*shape[:-1], row)
        tensors[name] = Tensor(shape, kind, stored)
    return tensors
