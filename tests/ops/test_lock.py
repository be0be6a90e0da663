"""One training per workdir: a second one replaces a dead owner, but never a living one."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import until

from agentrl_jax.machine import lock, processes
from agentrl_jax.sweeps import status

OWNER = """
import pathlib, sys, time
from agentrl_jax.machine import lock
lease = lock.take(pathlib.Path(sys.argv[1]), beat_s=0.02)
print('mine', flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """A second process that trains in tmp_path."""
    process = subprocess.Popen(
        [sys.executable, '-c', OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'mine\n'
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def shared_disk(monkeypatch):
    """A file system without locks, viewed from another host."""

    def fail(*_, **__):
        raise OSError(errno.ENOTSUP, 'Operation not supported')

    monkeypatch.setattr(lock.filelock.FileLock, '_acquire', fail)
    monkeypatch.setattr(lock, 'machine', lambda: ('this host', 'its boot'))


def test_a_second_training_is_rejected_until_the_first_is_killed(owner, tmp_path, monkeypatch):
    """Previously it ended with code 0 and checkpoints of both. A stopped process keeps its lock."""
    monkeypatch.setattr(lock, 'PATIENCE_S', 0.05)
    owner.send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(ValueError, match=f'process {owner.pid} on {os.uname().nodename}, '):
            lock.take(tmp_path, stale_s=0.1)
    assert lock.is_held(tmp_path) and lock.owner(tmp_path) == lock.HERE
    assert status.claim(tmp_path) is None and status.is_locked(tmp_path)  # sweeps leave it alone
    owner.kill()
    owner.wait()
    assert not lock.is_held(tmp_path) and lock.owner(tmp_path) == ''
    assert lock.read_lease(tmp_path)['pid'] == owner.pid
    os.close(status.claim(tmp_path))
    (tmp_path / status.LOCK_FILE).unlink()
    began = time.monotonic()
    lease = lock.take(tmp_path, stale_s=60)
    assert time.monotonic() - began < 30 and lock.read_lease(tmp_path)['pid'] == os.getpid()
    lease.release()
    assert list(tmp_path.iterdir()) == [] and lock.owner(tmp_path) == ''


def test_a_training_on_another_host_is_detected_by_its_heartbeat(owner, tmp_path, shared_disk):
    with pytest.raises(ValueError, match=f'process {owner.pid} '):
        lock.take(tmp_path, stale_s=20)
    assert lock.owner(tmp_path) == os.uname().nodename


@pytest.mark.parametrize('text', [None, '', 'x', '{"pid": '])
def test_a_stale_lease_gets_a_new_owner(owner, tmp_path, shared_disk, monkeypatch, text):
    """Independent of clocks: the count did not change while this host's clock advanced."""
    monkeypatch.setattr(time, 'time', lambda: 0.0)
    owner.kill()
    owner.wait()
    path = tmp_path / lock.LEASE_FILE
    path.write_text(path.read_text() if text is None else text)
    os.utime(path, (2**33, 2**33))
    lock.take(tmp_path, stale_s=0.2).release()


def test_a_hung_owner_ends_after_it_was_replaced(owner, tmp_path, shared_disk):
    """A suspended host must not continue while another host trains in its workdir."""
    errors = []
    owner.send_signal(signal.SIGSTOP)
    second = lock.take(tmp_path, stale_s=0.2, beat_s=0.02, lost=errors.append)
    owner.send_signal(signal.SIGCONT)
    assert owner.wait(timeout=60) == 1
    time.sleep(0.1)
    assert errors == [] and lock.read_lease(tmp_path)['pid'] == os.getpid()
    path, other = tmp_path / lock.LEASE_FILE, tmp_path / 'other'
    theirs = json.dumps(json.loads(path.read_text()) | {'token': 'x', 'pid': 7})

    def replace_lease():  # repeated if a heartbeat overwrites it
        other.write_text(theirs)
        os.replace(other, path)
        time.sleep(0.1)
        return errors

    until(replace_lease)
    assert 'was taken over by process 7 ' in errors[0]
    second.release()
    assert lock.read_lease(tmp_path)['pid'] == 7  # another owner's lease stays


def test_a_disk_that_fills_does_not_end_a_lease(tmp_path, monkeypatch):
    errors = []
    lease = lock.take(tmp_path, beat_s=0.01, lost=errors.append)

    def full(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    before = lock.read_lease(tmp_path)['beats']
    with monkeypatch.context() as patch:
        patch.setattr(lock.files, 'write_atomic', full)
        time.sleep(0.1)
    (tmp_path / lock.LEASE_FILE).unlink()  # deleted by a user
    until(lambda: (lock.read_lease(tmp_path) or {'beats': 0})['beats'] > before)
    lease.release()
    assert errors == []


def test_training_locks_its_workdir_and_removes_it_if_it_stayed_empty(tmp_path):
    for names in ([], ['kept']):
        with (
            contextlib.suppress(KeyError),
            processes.exclusive_workdir(tmp_path / 'run') as workdir,
        ):
            assert lock.is_held(workdir) and lock.read_lease(workdir)['pid'] == os.getpid()
            for name in names:
                (workdir / name).touch()
            raise KeyError
        assert workdir.exists() == bool(names)
    assert [path.name for path in workdir.iterdir()] == ['kept']
