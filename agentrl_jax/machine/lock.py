"""One run per workdir: a lock that the kernel releases, and a lease that other hosts can read.

Process 0 of a run holds training.lock (filelock, flock). The kernel releases it however that
process ends, so a restart on this host works immediately, even after kill -9. On shared folders
(NFS, gcsfuse), flock may not work across hosts. The owner therefore also increments a count in
lease.json every BEAT_S seconds. Clocks of hosts are never compared: a process that finds another
host's lease watches it for STALE_S seconds of monotonic time. It takes over if the count does not
change. An owner that was suspended in the meantime finds the new lease and exits.
"""

import contextlib
import errno
import json
import os
import pathlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import filelock

from agentrl_jax.machine import files

LOCK_FILE, LEASE_FILE = 'training.lock', 'lease.json'  # in the workdir
HERE = 'here'  # an owner on this host
BEAT_S = 10.0  # between two heartbeats
STALE_S = 60.0  # without a heartbeat, after which a run on another host counts as dead
PATIENCE_S = 1.0  # other processes hold the lock briefly to check whether it is free
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # file systems without flock


def machine() -> tuple[str, str]:
    """(host name, boot id): equal for processes that share a kernel and therefore its locks."""
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id')
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else ''


def _acquire(workdir: pathlib.Path, patience_s: float) -> filelock.FileLock | None:
    """Acquire the lock; None if the file system has no locks. Raises filelock.Timeout if held."""
    lock = filelock.FileLock(workdir / LOCK_FILE, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=patience_s, poll_interval=0.05)
    except OSError as error:
        if isinstance(error, filelock.Timeout) or error.errno not in NO_LOCKS:
            raise
        return None
    return lock


def is_held(workdir: pathlib.Path) -> bool:
    """Whether a run on this host is using the workdir."""
    if not (workdir / LOCK_FILE).exists():
        return False
    try:
        lock = _acquire(workdir, 0)
    except filelock.Timeout:
        return True
    if lock is not None:
        lock.release()
    return False


def read_lease(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Return lease.json, with 'unknown' for missing fields; None if there is no lease."""
    try:
        text = (workdir / LEASE_FILE).read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:
        return None
    lease = dict.fromkeys(('host', 'pid', 'kernel', 'since'), 'unknown') | {'token': text}
    with contextlib.suppress(ValueError, TypeError):  # damaged: liveness is inferred from changes
        lease |= json.loads(text)
    return lease


def owner(workdir: pathlib.Path) -> str:
    """Return where a run uses the workdir: HERE, the name of another host, or '' for nowhere.

    Does not wait: another host's lease counts if it is younger than STALE_S.
    """
    lease = read_lease(workdir)
    if lease is None:
        return ''
    here = (lease['host'], lease['kernel']) == machine()
    with contextlib.suppress(PermissionError):  # read-only users: use the age of the lease
        if here:
            return HERE if is_held(workdir) else ''
    with contextlib.suppress(FileNotFoundError):
        if time.time() - (workdir / LEASE_FILE).stat().st_mtime < STALE_S:
            return HERE if here else str(lease['host'])
    return ''


def _in_use(workdir: pathlib.Path, lease: dict[str, Any] | None) -> ValueError:
    owner = 'another process'
    if lease is not None:
        owner = f'process {lease["pid"]} on {lease["host"]}, since {lease["since"]}'
    return ValueError(
        f'{workdir} is in use by another run ({owner}): wait until it ends, stop it, or use '
        'another workdir'
    )


def take(
    workdir: pathlib.Path,
    *,
    beat_s: float = BEAT_S,
    stale_s: float = STALE_S,
    lost: Callable[[str], None] | None = None,
) -> 'Lease':
    """Lock the workdir for this process until release(); ValueError if another run uses it.

    lost: called with a message if another run takes it over; by default, the process exits.
    """
    try:
        lock = _acquire(workdir, PATIENCE_S)
    except filelock.Timeout as error:
        raise _in_use(workdir, read_lease(workdir)) from error
    try:
        _wait_for_signs_of_life(workdir, stale_s, locked=lock is not None)
        return Lease(workdir, lock, beat_s, lost or _end)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _wait_for_signs_of_life(workdir: pathlib.Path, stale_s: float, *, locked: bool) -> None:
    """Wait until the owner of the lease counts as dead. Raises ValueError if it is alive."""
    lease = read_lease(workdir)
    if lease is None or (locked and (lease['host'], lease['kernel']) == machine()):
        return
    print(
        f'{workdir} was in use by process {lease["pid"]} on {lease["host"]}: waiting {stale_s:.0f} '
        's for a heartbeat',
        file=sys.stderr,
        flush=True,
    )
    start = time.monotonic()
    while time.monotonic() < start + stale_s:
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
    """An owner's lock on its workdir. Create it with take()."""

    def __init__(
        self,
        workdir: pathlib.Path,
        lock: filelock.FileLock | None,
        beat_s: float,
        lost: Callable[[str], None],
    ):
        self._workdir, self._lock, self._beat_s, self._lost = workdir, lock, beat_s, lost
        self._beats, self._ended = 0, threading.Event()
        self.token = secrets.token_hex(8)  # identifies this owner in lease.json
        host, kernel = machine()
        since = time.strftime('%Y-%m-%d %H:%M:%S')  # for people
        self._known = {'host': host, 'pid': os.getpid(), 'kernel': kernel, 'since': since}
        self._write()
        self._thread = threading.Thread(target=self._live, name='lease', daemon=True)
        self._thread.start()

    def _write(self) -> None:
        document = {**self._known, 'token': self.token, 'beats': self._beats}
        files.write_atomic(self._workdir / LEASE_FILE, json.dumps(document) + '\n')

    def _live(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._beats += 1
            with contextlib.suppress(OSError):  # full disk or unreachable server: try again
                other = read_lease(self._workdir)
                if other is None or other['token'] == self.token:
                    self._write()
                    continue
                self._ended.set()
                self._lost(
                    f'{self._workdir} was taken over by process {other["pid"]} on '
                    f'{other["host"]}, because this one sent no heartbeat; it exits'
                )

    def release(self) -> None:
        """End the lease; another owner's files are kept."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the workdir may be gone
            lease = read_lease(self._workdir)
            if lease is not None and lease['token'] == self.token:
                (self._workdir / LEASE_FILE).unlink()
                (self._workdir / LOCK_FILE).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()
