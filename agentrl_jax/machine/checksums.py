"""Checksums of arrays, which no mesh changes, and digests of the files of a folder.

An array counts as 32-bit words. Each word is mixed with its place in the whole array by a
bijection and all are added modulo 2^32: shards need no more than their own words and one sum. If a
single word differs, and so for any single flipped bit, the sums differ for certain; other damage
escapes two sums with different mixing with a probability of about 2^-64.
"""

import concurrent.futures
import errno
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SALTS = (0x9E3779B9, 0x7F4A7C15)  # of the two sums: halves of 2^64 / golden ratio
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SMALL = 1 << 16  # bytes of an array that the host sums
READERS = 8  # threads that digest files


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path; dict, dataclass and tuple entries look alike, as Orbax names them.

    What a state keeps in `extra` has the name that it has there, as in older checkpoints.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = (jax.tree_util.keystr(path, simple=True, separator='.') for path, _ in flat)
    leaves = (leaf for _, leaf in flat)
    return {key.removeprefix('extra.'): leaf for key, leaf in zip(keys, leaves, strict=True)}


def arrays(tree: Any) -> dict[str, str]:
    """Checksum of every array by dotted path, 16 hexadecimal digits; all processes must call.

    One after another: sums under way at the same time over several devices of several processes can
    wait for one another for ever.
    """
    sums = {name: np.asarray(_sums(leaf)) for name, leaf in leaves(tree).items()}
    return {name: f'{int(a):08x}{int(b):08x}' for name, (a, b) in sums.items()}


def digest(tree: Any) -> str:
    """SHA-256 of the checksums of all arrays; all processes must call."""
    return hashlib.sha256(json.dumps(arrays(tree)).encode()).hexdigest()


def _sums(leaf: Any) -> jax.Array | np.ndarray:
    """Small arrays are summed on the host: a program for each of their shapes costs more."""
    leaf = jnp.asarray(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.is_fully_addressable and leaf.nbytes <= SMALL:
        return host_sums(np.asarray(leaf))
    split = isinstance(leaf.sharding, NamedSharding)  # then every process reads the sums
    return _program(NamedSharding(leaf.sharding.mesh, P()) if split else None)(leaf)


@functools.cache
def _program(layout: NamedSharding | None) -> Any:
    return jax.jit(device_sums, out_shardings=layout)


def device_sums(array: jax.Array) -> jax.Array:
    """uint32 [2]: the sums of the words of an array of any shape and dtype, where it lies.

    8-byte numbers get a last axis of two words, those of 1 or 2 bytes are a word each.
    """
    array = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    word = WORDS[min(array.dtype.itemsize, 4)]
    words = jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32) for mixed in _mixed(words, place)])


def host_sums(array: np.ndarray) -> np.ndarray:
    """device_sums in NumPy."""
    flat = np.ascontiguousarray(array).reshape(-1)
    words = flat.view(WORDS[min(array.dtype.itemsize, 4)]).astype(np.uint32)
    place = np.arange(words.size, dtype=np.uint32)
    return np.stack([np.sum(mixed, dtype=np.uint32) for mixed in _mixed(words, place)])


def _mixed(words: Any, place: Any) -> list[Any]:
    return [_mix(words ^ _mix(place ^ np.uint32(salt))) for salt in SALTS]


def _mix(word: Any) -> Any:
    """A bijection of uint32: the finaliser of MurmurHash3 (A. Appleby, public domain)."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def files(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """{'bytes', 'sha256'} of every file below a folder, by its path there; all go to the disk."""
    found = sorted(path for path in folder.rglob('*') if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        digests = list(readers.map(functools.partial(_digest, sync=True), found))
    return {
        path.relative_to(folder).as_posix(): {'bytes': path.stat().st_size, 'sha256': digest}
        for path, digest in zip(found, digests, strict=True)
    }


def _digest(path: pathlib.Path, *, sync: bool = False) -> str:
    with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def first_difference(
    folder: pathlib.Path, known: dict[str, dict[str, Any]], *, part: int = 0, of: int = 1
) -> tuple[int, str] | None:
    """(number, what is wrong) of the first of the known files that is not as it was; None if none.

    Every of-th file from number `part` on is looked at, in the order of their names. Sizes are
    compared before any file is read.
    """
    names = list(enumerate(sorted(known)))[part::of]
    for number, name in names:
        path, size = folder / name, known[name]['bytes']
        if not path.is_file():
            return number, 'is missing'
        if path.stat().st_size != size:
            return number, f'has {path.stat().st_size:,} bytes of {size:,}'
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        differ = readers.map(
            lambda name: _difference(folder / name, known[name]['sha256']),
            [name for _, name in names],
        )
        found = (pair for pair in zip(names, differ, strict=True) if pair[1])
        first = next(found, None)
    return None if first is None else (first[0][0], first[1])


def _difference(path: pathlib.Path, digest: str) -> str:
    try:
        return '' if _digest(path) == digest else 'does not hold what was written'
    except OSError as error:
        if error.errno != errno.EIO:  # others are no damage: rights, a server that is away
            raise
        return 'cannot be read from the disk'
