"""Full, slow, read-only and limited disks give a one-line error, and the command can resume."""

import errno
import itertools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.machine import checkpoint, files

pytestmark = pytest.mark.soak


@pytest.fixture
def small_disk(tmp_path):
    """A disk of three megabytes; skipped if mounting is not permitted."""
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'none', str(tmp_path)]
    if sys.platform != 'linux' or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('mounting is not permitted here')
    yield tmp_path
    subprocess.run(['umount', '-l', str(tmp_path)], check=True)


def test_the_error_of_a_full_disk_names_the_folder_and_the_size(small_disk, monkeypatch):
    usage = checkpoint.shutil.disk_usage(small_disk)
    monkeypatch.setattr(checkpoint.shutil, 'disk_usage', lambda _: usage._replace(free=1 << 40))
    opened = checkpoint.open_checkpoints(small_disk, keep=2)
    noise = jax.random.normal(jax.random.key(0), (1000, 1000))  # four megabytes
    assert checkpoint.save(opened, 1, {'w': noise[:200]}, {})
    assert checkpoint.save(opened, 2, {'w': noise}, {})
    with pytest.raises(OSError) as caught:
        checkpoint.wait(opened)
    assert caught.value.errno == errno.ENOSPC
    assert checkpoint.latest_step(opened) == 1
    message = files.format_error(caught.value)
    assert str(small_disk / checkpoint.FOLDER) in message and '4,000,000 bytes' in message
    assert bool((checkpoint.restore(opened, abstract(noise[:200]))[0]['w'] == noise[:200]).all())


def abstract(array):
    return {'w': jax.ShapeDtypeStruct(array.shape, array.dtype)}


def test_a_disk_that_becomes_read_only_loses_nothing(small_disk):
    opened = checkpoint.open_checkpoints(small_disk, keep=2)
    checkpoint.save(opened, 1, {'w': jnp.ones(9)}, {})
    checkpoint.wait(opened)
    subprocess.run(['mount', '-o', 'remount,ro', str(small_disk)], check=True)
    began = time.monotonic()
    with pytest.raises(OSError) as caught:
        checkpoint.save(opened, 2, {'w': jnp.zeros(9)}, {})
        checkpoint.wait(opened)
    assert time.monotonic() - began < 60  # Orbax would wait five minutes for a folder
    assert caught.value.errno == errno.EROFS
    assert bool(checkpoint.restore(opened, abstract(jnp.ones(9)))[0]['w'].all())
    subprocess.run(['mount', '-o', 'remount,rw', str(small_disk)], check=True)
    assert checkpoint.save(opened, 2, {'w': jnp.zeros(9)}, {})
    checkpoint.close(opened)
    assert checkpoint.steps(opened.directory) == [1, 2]


def test_setting_the_clock_while_a_checkpoint_is_written_does_no_harm(tmp_path, monkeypatch):
    """Orbax measured its timeout of 20 minutes with the wall clock, and gave up."""
    real_time = time.time
    opened = checkpoint.open_checkpoints(tmp_path, keep=2)
    for step, jump in enumerate(range(0, 80, 5)):  # set a day forward at that call of time()
        calls = itertools.count()
        monkeypatch.setattr(time, 'time', lambda: real_time() + 86400 * (next(calls) >= jump))  # noqa: B023
        checkpoint.save(opened, step, {'w': jnp.ones(9)}, {})
        checkpoint.wait(opened)
    assert next(calls) > 20  # otherwise Orbax uses another clock, and this tests nothing
    assert checkpoint.latest_step(opened) == step
