"""One training in a workdir: refused beside a living one, at once after a dead one, on any host."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

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
    """Another process that trains in tmp_path."""
    process = subprocess.Popen(
        [sys.executable, '-c', OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'mine\n'
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(lock, 'PATIENCE_S', 0.05)


@pytest.fixture
def without_flock(monkeypatch):
    """A file system that cannot lock files, or locks them for each host alone."""

    def refuse(*_):
        raise OSError(errno.ENOTSUP, 'Operation not supported')

    monkeypatch.setattr(lock.fcntl, 'flock', refuse)


def wait_for(condition, within_s=20):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_training_is_refused_until_the_first_is_killed(owner, tmp_path, impatient, capsys):
    """It ended with code 0 and checkpoints of both. A stopped one still has its workdir."""
    owner.send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(ValueError, match='is in use by a training') as caught:
            lock.take(tmp_path, stale_s=0.1)
    said = str(caught.value)
    assert f'(process {owner.pid} on {os.uname().nodename}, since 20' in said
    assert '\n' not in said and lock.is_held(tmp_path)
    assert status.claim(tmp_path) is None and status.is_locked(tmp_path)  # sweeps leave it alone
    owner.kill()
    owner.wait()
    assert not lock.is_held(tmp_path) and lock.read_lease(tmp_path)['pid'] == owner.pid
    os.close(status.claim(tmp_path))
    (tmp_path / status.LOCK_FILE).unlink()
    began = time.monotonic()
    lease = lock.take(tmp_path, stale_s=60)
    assert time.monotonic() - began < 30 and 'waiting' not in capsys.readouterr().err
    assert lock.read_lease(tmp_path)['pid'] == os.getpid()
    assert lock.owner(tmp_path) == lock.HERE
    lease.release()
    assert list(tmp_path.iterdir()) == [] and lock.owner(tmp_path) == ''


def test_where_files_cannot_be_locked_the_process_itself_is_looked_for(
    owner, tmp_path, without_flock
):
    with pytest.raises(ValueError, match=f'process {owner.pid} '):
        lock.take(tmp_path, stale_s=0.1)
    path = tmp_path / lock.LEASE_FILE
    owner.kill()
    owner.wait()
    number_used_again = json.loads(path.read_text()) | {'pid': 1, 'started': -5}
    path.write_text(json.dumps(number_used_again))
    lock.take(tmp_path, stale_s=600).release()


def test_a_training_of_another_host_is_seen_by_its_signs_of_life(
    owner, tmp_path, without_flock, monkeypatch
):
    monkeypatch.setattr(lock, 'kernel', lambda: 'another host')
    with pytest.raises(ValueError, match=f'process {owner.pid} '):
        lock.take(tmp_path, stale_s=20)


@pytest.mark.parametrize('text', [None, '', 'x', '{"pid": '])
def test_a_lease_that_stands_still_is_taken_over(
    owner, tmp_path, without_flock, monkeypatch, capsys, text
):
    """Whatever clocks say: the counter has not moved while this host's own clock did."""
    monkeypatch.setattr(lock, 'kernel', lambda: 'another host')
    monkeypatch.setattr(time, 'time', lambda: 0.0)
    owner.kill()
    owner.wait()
    path = tmp_path / lock.LEASE_FILE
    path.write_text(path.read_text() if text is None else text)
    os.utime(path, (2**33, 2**33))
    lock.take(tmp_path, stale_s=0.2).release()
    said = capsys.readouterr().err
    assert said.startswith(f'{tmp_path} was in use by') and 'for a sign of its life' in said


def test_who_hung_and_was_replaced_ends(owner, tmp_path, without_flock, monkeypatch):
    """A host that was suspended, say: it must not go on beside the one that took over."""
    said = []
    monkeypatch.setattr(lock, 'kernel', lambda: 'another host')
    owner.send_signal(signal.SIGSTOP)
    second = lock.take(tmp_path, stale_s=0.2, beat_s=0.02, lost=said.append)
    owner.send_signal(signal.SIGCONT)
    assert owner.wait(timeout=60) == 1
    time.sleep(0.1)
    assert said == [] and lock.read_lease(tmp_path)['pid'] == os.getpid()
    path = tmp_path / lock.LEASE_FILE
    other = tmp_path / 'other'  # at once: who reads half a lease knows of nobody
    other.write_text(json.dumps(json.loads(path.read_text()) | {'token': 'x', 'pid': 7}))
    os.replace(other, path)
    wait_for(lambda: said)
    assert 'was taken over by process 7 ' in said[0]
    second.release()
    assert lock.read_lease(tmp_path)['pid'] == 7  # what is another's stays


def test_a_disk_that_fills_does_not_end_a_lease(tmp_path, monkeypatch):
    said = []
    lease = lock.take(tmp_path, beat_s=0.01, lost=said.append)

    def full(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    before = lock.read_lease(tmp_path)['beats']
    with monkeypatch.context() as patch:
        patch.setattr(lock.files, 'write_atomic', full)
        time.sleep(0.1)
    (tmp_path / lock.LEASE_FILE).unlink()  # and somebody tidied up
    wait_for(lambda: (lock.read_lease(tmp_path) or {'beats': 0})['beats'] > before)
    lease.release()
    assert said == []


def test_a_lock_that_was_just_removed_is_no_lock(tmp_path):
    """Who opened the file before its owner unlinked it must not hold a lock on nothing."""
    path = tmp_path / lock.LOCK_FILE
    descriptor, ours = lock._lock(path)
    path.unlink()
    again, also = lock._lock(path)
    assert ours and also and os.fstat(again).st_ino == path.stat().st_ino
    os.close(descriptor)
    os.close(again)


def test_training_holds_its_workdir_and_leaves_nothing_of_one_that_was_refused(tmp_path):
    with processes.only_training(tmp_path / 'run') as workdir:
        assert lock.is_held(workdir) and lock.read_lease(workdir)['pid'] == os.getpid()
    assert not workdir.exists()
    with pytest.raises(KeyError), processes.only_training(tmp_path / 'run') as workdir:
        (workdir / 'kept').touch()
        raise KeyError
    assert [path.name for path in workdir.iterdir()] == ['kept']
