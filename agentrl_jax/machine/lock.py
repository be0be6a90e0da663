"""One training in a workdir: a lock that the kernel frees, and a lease that other hosts can see.

training.lock is locked (flock) as long as process 0 of a run lives. The kernel frees it however
that process ends, so after kill -9 the next start on this host works at once. Where hosts share the
folder (NFS, gcsfuse), flock may not reach the others: for them lease.json names who trains, with a
count that the owner raises every BEAT_S seconds. Clocks of hosts are never compared: who finds the
lease of another host watches it for STALE_S seconds of its own monotonic clock, and takes over if
nothing moves. An owner that was stopped for so long and wakes up finds the other's lease, and ends.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import socket
import sys
import threading
import time
from typing import Any

from agentrl_jax.machine import files

LOCK_FILE, LEASE_FILE = 'training.lock', 'lease.json'  # in the workdir
HERE = 'here'  # of owners: a process that this one can see
BEAT_S = 10.0  # between two signs of life
STALE_S = 60.0  # without one, after which another host's training counts as dead
PATIENCE_S = 1.0  # for a lock held for a moment by a process that looks whether it is free
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # file systems without flock


def kernel() -> str:
    """Equal for two processes that can see each other's numbers; '' where that is not known."""
    try:
        boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def started(pid: int) -> int | None:
    """When a process of this kernel began, in ticks since the boot; None if it is gone.

    A number is used again after a while, a pair of number and start is not.
    """
    try:
        stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(')')[2].split()[19])  # the name before may hold anything


def is_held(workdir: pathlib.Path) -> bool:
    """Does a process of this host train here now?"""
    if not (workdir / LOCK_FILE).exists():
        return False
    descriptor, free = _lock(workdir / LOCK_FILE)
    os.close(descriptor)
    return not free


def _lock(path: pathlib.Path) -> tuple[int, bool]:
    """(descriptor, is it ours?); where files cannot be locked all are, and the lease decides."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return descriptor, False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        if os.fstat(descriptor).st_nlink:
            return descriptor, True
        os.close(descriptor)  # its last owner has just removed it: a lock on nothing


def read_lease(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Who trains in a workdir, as far as a file can tell."""
    try:
        text = (workdir / LEASE_FILE).read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:
        return None
    unknown = dict.fromkeys(('host', 'pid', 'started', 'kernel', 'since'), 'unknown')
    try:
        return {**unknown, 'token': text, **json.loads(text)}
    except (ValueError, TypeError):  # damaged: liveness is inferred from changes
        return {**unknown, 'token': text}


def owner(workdir: pathlib.Path) -> str:
    """Who trains in a workdir at this moment: HERE, the name of another host, or '' for nobody.

    Only reads, and does not wait: of another host the age of the lease decides.
    """
    lease = read_lease(workdir)
    if lease is None:
        return ''
    if (lease['kernel'], lease['host']) == (kernel(), socket.gethostname()):
        lives = isinstance(lease['pid'], int) and started(lease['pid']) == lease['started']
        return HERE if lives else ''
    with contextlib.suppress(FileNotFoundError):
        if time.time() - (workdir / LEASE_FILE).stat().st_mtime < STALE_S:
            return str(lease['host'])
    return ''


def _in_use(workdir: pathlib.Path, lease: dict[str, Any] | None) -> ValueError:
    who = 'another process'
    if lease is not None:
        who = f'process {lease["pid"]} on {lease["host"]}, since {lease["since"]}'
    return ValueError(
        f'{workdir} is in use by a training ({who}): wait until it ends, stop it, or name another '
        'workdir'
    )


def take(
    workdir: pathlib.Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S, lost: Any = None
) -> 'Lease':
    """The workdir for this process, until release(); ValueError if another training has it.

    lost: called with a sentence if another one took it meanwhile; by default the process ends.
    """
    tried = time.monotonic()
    while True:
        descriptor, ours = _lock(workdir / LOCK_FILE)
        if ours:
            break
        os.close(descriptor)
        if time.monotonic() > tried + PATIENCE_S:
            raise _in_use(workdir, read_lease(workdir))
        time.sleep(PATIENCE_S / 20)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        _wait_for_signs_of_life(workdir, stale_s)
        lease = Lease(workdir, descriptor, beat_s, lost or _end)
        stack.pop_all()
    return lease


def _wait_for_signs_of_life(workdir: pathlib.Path, stale_s: float) -> None:
    """Returns when no other training can be alive though its lease is there."""
    lease = read_lease(workdir)
    if lease is None:
        return
    if (lease['kernel'], lease['host']) == (kernel(), socket.gethostname()):
        lives = lease['started'] is not None and started(lease['pid']) == lease['started']
        if lives and lease['pid'] != os.getpid():
            raise _in_use(workdir, lease)
        return
    print(
        f'{workdir} was in use by process {lease["pid"]} on {lease["host"]}: waiting {stale_s:.0f} '
        's for a sign of its life',
        file=sys.stderr,
        flush=True,
    )
    began = time.monotonic()
    while time.monotonic() < began + stale_s:
        time.sleep(min(1.0, stale_s / 20))
        now = read_lease(workdir)
        if now is None:
            return
        if now != lease:
            raise _in_use(workdir, now)


def _end(sentence: str) -> None:
    print(f'error: {sentence}', file=sys.stderr, flush=True)
    os._exit(1)


class Lease:
    """What the owner of a workdir holds; made by take()."""

    def __init__(self, workdir: pathlib.Path, descriptor: int, beat_s: float, lost: Any):
        self._workdir, self._descriptor, self._beat_s = workdir, descriptor, beat_s
        self._lost, self._beats, self._ended = lost, 0, threading.Event()
        self._known = {
            'host': socket.gethostname(),
            'pid': os.getpid(),
            'started': started(os.getpid()),
            'kernel': kernel(),
            'since': time.strftime('%Y-%m-%d %H:%M:%S'),  # for people
            'token': secrets.token_hex(8),
        }
        self._write()
        self._thread = threading.Thread(target=self._live, name='lease', daemon=True)
        self._thread.start()

    def _write(self) -> None:
        document = {**self._known, 'beats': self._beats}
        files.write_atomic(self._workdir / LEASE_FILE, json.dumps(document) + '\n')

    def _live(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._beats += 1
            with contextlib.suppress(OSError):  # a full disk, a server that is away: once more
                if self._is_ours():
                    self._write()

    def _is_ours(self) -> bool:
        other = read_lease(self._workdir)
        if other is None or other['token'] == self._known['token']:
            return True
        self._ended.set()
        self._lost(
            f'{self._workdir} was taken over by process {other["pid"]} on {other["host"]}, as '
            'this one gave no sign of life; it ends here'
        )
        return False

    @property
    def token(self) -> str:
        """What lease.json names this owner by."""
        return self._known['token']

    def release(self) -> None:
        """Ends the lease; what another training has written stays."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the workdir may be gone
            lease = read_lease(self._workdir)
            if lease is not None and lease['token'] == self._known['token']:
                (self._workdir / LEASE_FILE).unlink()
                (self._workdir / LOCK_FILE).unlink()
        os.close(self._descriptor)
