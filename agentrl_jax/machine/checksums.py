"""Digests of the files of a folder, and of parameters independently of their mesh.

An array is read as 32-bit words. A bijection mixes each word with its position in the array, and
the results are added modulo 2^32. A shard therefore needs only its own words and one sum.
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

SALTS = (0x9E3779B9, 0x7F4A7C15)  # for the two sums: the halves of 2^64 / golden ratio
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
READERS = 8  # threads that digest files


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, in Orbax's notation: dicts, dataclasses and tuples look the same.

    Entries of a state's `extra` have no prefix, as in older checkpoints.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    keys = (jax.tree_util.keystr(path, simple=True, separator='.') for path, _ in flat)
    leaves = (leaf for _, leaf in flat)
    return {key.removeprefix('extra.'): leaf for key, leaf in zip(keys, leaves, strict=True)}


def digest(tree: Any) -> str:
    """SHA-256 of the two sums of every array, by dotted path. All processes must call.

    Arrays are summed one at a time: concurrent sums over several processes can deadlock.
    """
    sums = {name: np.asarray(_program(_layout(leaf))(leaf)) for name, leaf in leaves(tree).items()}
    listed = {name: f'{int(a):08x}{int(b):08x}' for name, (a, b) in sums.items()}
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _layout(leaf: jax.Array) -> NamedSharding | None:
    """A layout of the sums that every process can read."""
    split = isinstance(leaf.sharding, NamedSharding)
    return NamedSharding(leaf.sharding.mesh, P()) if split else None


@functools.cache
def _program(layout: NamedSharding | None) -> Any:
    return jax.jit(array_sums, out_shardings=layout)


def array_sums(array: jax.Array) -> jax.Array:
    """Return the two sums, uint32 [2], of an array of any shape and dtype.

    8-byte numbers are two words each (a new last axis); numbers of 1 or 2 bytes are one word each.
    """
    array = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    word = WORDS[min(array.dtype.itemsize, 4)]
    words = jax.lax.bitcast_convert_type(array, word).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    sums = [
        jnp.sum(_mix(words ^ _mix(place ^ jnp.uint32(salt))), dtype=jnp.uint32) for salt in SALTS
    ]
    return jnp.stack(sums)


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of uint32: the finaliser of MurmurHash3 (A. Appleby, public domain)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def files(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Sync all files of a folder to disk; return {'bytes', 'sha256'} of each by relative path."""
    paths = sorted(path for path in folder.rglob('*') if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        digests = list(readers.map(functools.partial(_digest, sync=True), paths))
    return {
        path.relative_to(folder).as_posix(): {'bytes': path.stat().st_size, 'sha256': digest}
        for path, digest in zip(paths, digests, strict=True)
    }


def _digest(path: pathlib.Path, *, sync: bool = False) -> str:
    with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def first_difference(folder: pathlib.Path, known: dict[str, dict[str, Any]]) -> str:
    """Return the first known file that has changed, and how; '' if none has.

    Compares all sizes before it reads any file.
    """
    for name in sorted(known):
        path, size = folder / name, known[name]['bytes']
        if not path.is_file():
            return f'{path} is missing'
        if path.stat().st_size != size:
            return f'{path} has {path.stat().st_size:,} bytes of {size:,}'
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        differences = readers.map(lambda x: _difference(folder / x, known[x]), sorted(known))
        return next(filter(None, differences), '')


def _difference(path: pathlib.Path, known: dict[str, Any]) -> str:
    try:
        same = _digest(path) == known['sha256']
        return '' if same else f'{path} has changed since it was written'
    except OSError as error:
        if error.errno != errno.EIO:  # not damage: permissions or an unreachable server
            raise
        return f'{path} cannot be read from the disk'
