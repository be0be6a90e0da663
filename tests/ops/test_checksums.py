"""Checksums: no mesh changes them, every flipped bit does; digests name the file that differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import checksums

DTYPES = ('float32', 'bfloat16', 'float16', 'int32', 'uint8', 'int8', 'bool')


def mixed(word):
    """MurmurHash3's finaliser, in Python's whole numbers."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
    word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
    return word ^ (word >> 16)


def naive_sums(array):
    """Word by word, from the bytes."""
    size = min(array.dtype.itemsize, 4)
    data = np.ascontiguousarray(array).tobytes()
    words = [int.from_bytes(data[i : i + size], 'little') for i in range(0, len(data), size)]
    return [
        sum(mixed(word ^ mixed(place ^ salt)) for place, word in enumerate(words)) % 2**32
        for salt in checksums.SALTS
    ]


def random_array(rng, shape, dtype):
    bits = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
    bits = bits % 2 if dtype == 'bool' else bits
    return bits.view(jnp.dtype(dtype)).reshape(shape)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(), (0,), (5,), (2, 3, 4)])
def test_host_and_device_do_what_the_definition_says(dtype, shape):
    """All bit patterns, nans with payloads among them."""
    array = random_array(np.random.default_rng(0), shape, dtype)
    want = naive_sums(array)
    np.testing.assert_array_equal(checksums.host_sums(array), want)
    np.testing.assert_array_equal(checksums.device_sums(jnp.asarray(array)), want)


def test_numbers_of_eight_bytes_are_two_words():
    with jax.enable_x64(True):
        array = np.random.default_rng(0).standard_normal((3, 2))
        np.testing.assert_array_equal(checksums.host_sums(array), naive_sums(array))
        np.testing.assert_array_equal(checksums.device_sums(jnp.asarray(array)), naive_sums(array))


def test_no_mesh_changes_a_checksum():
    """Whether the host sums (small arrays) or the devices."""
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices.reshape(4, 2), ('fsdp', 'tensor'))
    for width in (8, 4096):
        array = jax.random.normal(jax.random.key(0), (16, width))
        layouts = [P(), P('fsdp', 'tensor'), P('tensor'), P(None, ('fsdp', 'tensor'))]
        placed = [NamedSharding(mesh, spec) for spec in layouts]
        placed += [SingleDeviceSharding(devices[3])]
        tree = {str(n): jax.device_put(array, place) for n, place in enumerate(placed)}
        found = checksums.arrays(tree)
        a, b = checksums.host_sums(np.asarray(array))
        assert set(found.values()) == {f'{a:08x}{b:08x}'} and len(found) == 5
    assert array.nbytes > checksums.SMALL


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(DTYPES[:-1]), st.integers(1, 40))
def test_any_flipped_bit_changes_both_sums(seed, dtype, size):
    rng = np.random.default_rng(seed)
    array = random_array(rng, (size,), dtype)
    flipped = array.copy()
    flipped.view(np.uint8)[rng.integers(array.nbytes)] ^= np.uint8(1 << rng.integers(8))
    assert (checksums.host_sums(array) != checksums.host_sums(flipped)).all()


def test_two_numbers_that_changed_places_are_noticed():
    array = np.arange(300, dtype=np.float32)
    swapped = array.copy()
    swapped[[7, 255]] = swapped[[255, 7]]
    assert (checksums.host_sums(array) != checksums.host_sums(swapped)).all()


def test_leaves_are_named_and_keys_counted():
    tree = {'a': {'b': jnp.ones(2)}, 'c': (jax.random.key(7), np.zeros(3, np.int8))}
    found = checksums.arrays(tree)
    assert list(found) == ['a.b', 'c.0', 'c.1']
    a, b = checksums.host_sums(np.asarray(jax.random.key_data(tree['c'][0])))
    assert found['c.0'] == f'{a:08x}{b:08x}'


def test_the_first_file_that_differs_is_numbered(tmp_path):
    for name in ('a', 'folder/b', 'z'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'this is {name}')
    known = checksums.files(tmp_path)
    assert sorted(known) == ['a', 'folder/b', 'z'] and known['z']['bytes'] == 9
    (tmp_path / 'new').touch()  # what nobody wrote is nobody's loss
    assert checksums.first_difference(tmp_path, known) is None
    (tmp_path / 'folder/b').write_text('this is folder/c')
    assert checksums.first_difference(tmp_path, known) == (1, 'does not hold what was written')
    assert checksums.first_difference(tmp_path, known, part=0, of=2) is None  # looks at a and z
    assert checksums.first_difference(tmp_path, known, part=1, of=2)[0] == 1
    (tmp_path / 'z').write_text('this is')
    assert checksums.first_difference(tmp_path, known) == (2, 'has 7 bytes of 9')
    (tmp_path / 'a').unlink()
    assert checksums.first_difference(tmp_path, known) == (0, 'is missing')
