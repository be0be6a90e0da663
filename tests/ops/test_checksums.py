"""Digests of arrays, which depend on every bit but not on the mesh, and of files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import checksums


def mixed(word):
    """MurmurHash3's finaliser on Python integers."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
    word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
    return word ^ (word >> 16)


def naive_sums(array):
    size = min(array.dtype.itemsize, 4)
    data = np.ascontiguousarray(array).tobytes()
    words = [int.from_bytes(data[i : i + size], 'little') for i in range(0, len(data), size)]
    return [
        sum(mixed(word ^ mixed(index ^ salt)) for index, word in enumerate(words)) % 2**32
        for salt in checksums.SALTS
    ]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32', 'uint8', 'int8', 'bool'])
@pytest.mark.parametrize('shape', [(), (0,), (2, 3, 4)])
def test_sums_follow_the_definition_and_notice_a_flipped_bit(dtype, shape):
    bits = np.random.default_rng(0).integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    array = (bits % 2 if dtype == 'bool' else bits).view(jnp.dtype(dtype)).reshape(shape)
    sums = checksums.array_sums(jnp.asarray(array))
    np.testing.assert_array_equal(sums, naive_sums(array))
    if array.size:
        array.reshape(-1).view(np.uint8)[0] ^= 1
        assert (checksums.array_sums(jnp.asarray(array)) != sums).all()


def test_a_digest_is_the_same_on_every_mesh_and_in_earlier_versions():
    """Checkpoints of older versions contain digests of bases and teachers."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ('fsdp', 'tensor'))
    tree = {'a': {'b': jnp.arange(128.0).reshape(16, 8)}, 'c': jnp.ones(3, jnp.bfloat16)}
    expected = '8bcf2dd9521940cb1c4cacb90308639c7bef519e90bf1781d85952530726838c'
    assert checksums.digest(tree) == expected
    for spec in (P(), P('fsdp', 'tensor'), P(None, ('fsdp', 'tensor'))):
        tree['a']['b'] = jax.device_put(tree['a']['b'], NamedSharding(mesh, spec))
        assert checksums.digest(tree) == expected


def test_the_first_file_that_differs_is_named(tmp_path):
    for name in ('a', 'folder/b', 'z'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'this is {name}')
    known = checksums.files(tmp_path)
    assert sorted(known) == ['a', 'folder/b', 'z'] and known['z']['bytes'] == 9
    (tmp_path / 'new').touch()
    assert checksums.first_difference(tmp_path, known) == ''
    for name, text, end in (
        ('folder/b', 'this is folder/c', 'has changed since it was written'),
        ('z', 'shorter', 'has 7 bytes of 9'),  # sizes are compared first
    ):
        (tmp_path / name).write_text(text)
        assert checksums.first_difference(tmp_path, known) == f'{tmp_path / name} {end}'
    (tmp_path / 'a').unlink()
    assert checksums.first_difference(tmp_path, known) == f'{tmp_path / "a"} is missing'
