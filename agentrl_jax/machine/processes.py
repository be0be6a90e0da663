"""Processes of a run: joining, preemption, compile counts, exclusive use of a workdir."""

import contextlib
import os
import pathlib
import re
import signal
import sys
import time
import traceback
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.compilation_cache import compilation_cache

from agentrl_jax.machine import files, lock

COORDINATOR, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
JOIN = (COORDINATOR, COUNT, INDEX)  # environment variables of a run of several processes
DEVICES = 'JAX_LOCAL_DEVICE_IDS'  # environment variable of jax: the GPUs of a process
HEARTBEAT = 'AGENTRL_HEARTBEAT_S'  # environment variable: timeout of heartbeats, in seconds
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: state is saved, run the same command again
EXIT_DAMAGED = 65  # EX_DATAERR: the newest checkpoint is damaged; --fallback loads an older one
PATIENCE_S = 20.0  # until a file written by one host is visible on all
KEEP_FROM = 10**8  # parameters; the programs of larger models are kept for the next start
COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


class Launcher(NamedTuple):
    """A program that starts the processes of a run, and the environment variables it sets."""

    name: str
    count: str
    index: str
    local_index: str  # on its host
    address: str  # from which jax derives the address of the first process
    method: str  # jax's name of this detection method


# mpirun is first: it starts its daemons with srun, so its processes inherit srun's variables.
LAUNCHERS = (
    Launcher(
        name='mpirun',
        count='OMPI_COMM_WORLD_SIZE',
        index='OMPI_COMM_WORLD_RANK',
        local_index='OMPI_COMM_WORLD_LOCAL_RANK',
        address='OMPI_MCA_orte_hnp_uri',  # up to OpenMPI 4
        method='ompi',
    ),
    # Not SLURM_NTASKS: batch scripts and salloc shells also have it, without peers.
    Launcher(
        name='srun',
        count='SLURM_STEP_NUM_TASKS',
        index='SLURM_PROCID',
        local_index='SLURM_LOCALID',
        address='SLURM_STEP_NODELIST',
        method='slurm',
    ),
)


def launched() -> Launcher | None:
    """The launcher of this process; None if it started no other process."""
    for launcher in LAUNCHERS:
        if launcher.count in os.environ and launcher.index in os.environ:
            return launcher if _number(launcher.count) > 1 else None
    return None


def initialize_distributed(*, timeout_s: int = 300) -> None:
    """Join the processes of a run. Call this before anything else uses jax.

    The environment variables of JOIN or of a launcher (LAUNCHERS) define the processes. Without
    them, or with JAX_NUM_PROCESSES=1 alone, the run is a single process. With the address 'auto',
    jax detects the cluster (TPU slices). CPU collectives use gloo. A process without a heartbeat
    for AGENTRL_HEARTBEAT_S seconds (default 100) counts as dead, and the others exit.
    """
    # Otherwise jax would catch SIGTERM from now on, with no effect before training starts.
    jax.config.update('jax_enable_preemption_service', False)
    silence_s = _number(HEARTBEAT) if HEARTBEAT in os.environ else 0
    patience = {'initialization_timeout': timeout_s, 'heartbeat_timeout_seconds': silence_s or 100}
    names, launcher = {name for name in JOIN if name in os.environ}, launched()
    if COORDINATOR in names and os.environ[COORDINATOR] == 'auto':
        del os.environ[COORDINATOR]  # jax would use 'auto' as an address
        jax.distributed.initialize(**patience)
        return
    if (names == {COUNT} and os.environ[COUNT] == '1') or not (names or launcher):
        return
    missing = [name for name in JOIN if name not in names]
    if missing and launcher is None:
        raise ValueError(
            f'a run of several processes needs {", ".join(JOIN)}; not set: {", ".join(missing)}'
        )
    count = _number(COUNT if COUNT in names else launcher.count)
    if missing and DEVICES not in os.environ and launcher.local_index in os.environ:
        os.environ[DEVICES] = os.environ[launcher.local_index]  # as jax does for known launchers
    if COORDINATOR in names:
        coordinator = os.environ[COORDINATOR]
        where = f'at {coordinator}'
    elif launcher.address in os.environ:  # jax derives the address from the launcher's variables
        coordinator, where = None, f'of {launcher.name}'
        patience['cluster_detection_method'] = launcher.method
    else:
        raise ValueError(
            f'{launcher.name} started {count} processes, but jax cannot derive the address of the '
            f'first one. If they are one run, set {COORDINATOR}=HOST:PORT, the same for all. '
            f'If each is a separate run, set {COUNT}=1'
        )
    index = _number(INDEX if INDEX in names else launcher.index)
    if not 0 <= index < count:
        raise ValueError(f'{INDEX}={index} must be in 0..{count - 1}')
    print(  # after the timeout jax aborts and only reports that another process died
        f'process {index} of {count} waits for its peers {where}, up to {timeout_s} s',
        file=sys.stderr,
        flush=True,
    )
    jax.distributed.initialize(coordinator, count, index, **patience)


def _number(name: str) -> int:
    """A non-negative integer environment variable."""
    if not os.environ[name].isdigit():
        raise ValueError(f'{name}={os.environ[name]!r} must be a non-negative integer')
    return int(os.environ[name])


def fail(error: Exception, code: int = 1, *, workdir: str | os.PathLike | None = None) -> NoReturn:
    """Print an error as one line and exit; errors other than ValueError and OSError with traceback.

    Exits immediately: a normal exit would wait for failed threads, and for peers that wait for this
    process in a collective. Once it has exited, their collectives fail. workdir: the program's
    output folder, see files.format_error.
    """
    if not isinstance(error, (ValueError, OSError)):
        traceback.print_exception(error)
    print(f'error: {files.format_error(error, workdir)}', file=sys.stderr)
    if jax.process_count() > 1:
        print(
            f'process {jax.process_index()} of {jax.process_count()} exits; if another one exited '
            'first, see its output for the reason. To resume from the newest checkpoint, run the '
            'same command in all of them',
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def exclusive_workdir(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Create the workdir if needed and lock it for this run; process 0 holds the lock.

    Raises ValueError in all processes if another run uses it, or if it is not the same folder for
    all of them. Removes the folder afterwards if it is new and empty.
    """
    is_new = not files.local_path(path).expanduser().exists()
    workdir = files.check_workdir(path)
    lease = lock_error = None
    if jax.process_index() == 0:
        try:
            lease = lock.take(workdir)
        except ValueError as error:
            lock_error = error
    try:
        if jax.process_count() > 1:
            token = int(gather(np.uint32(zlib.crc32(lease.token.encode()) if lease else 0))[0])
            if token:
                check_shared(workdir, token)
            elif lock_error is None:
                raise ValueError(f'{workdir} is in use by another run, according to process 0')
        if lock_error:
            raise lock_error
        yield workdir
    finally:
        if lease is not None:
            lease.release()
        if is_new:
            with contextlib.suppress(OSError):
                workdir.rmdir()


def check_shared(workdir: pathlib.Path, token: int) -> None:
    """Raise ValueError in all processes unless all read process 0's lease; token: its CRC-32."""
    start, visible = time.monotonic(), False
    while not visible and time.monotonic() < start + PATIENCE_S:
        lease = lock.read_lease(workdir)
        visible = lease is not None and zlib.crc32(lease['token'].encode()) == token
        time.sleep(0 if visible else 0.2)
    if not gather(np.array(visible)).all():
        raise ValueError(
            f'{workdir} is not the same folder for all processes: use a shared disk or a bucket '
            f'(gs://...), or set {COUNT}=1 if each process is a separate run'
        )


class Interrupted(Exception):
    """The run must stop; unfinished work is discarded and repeated after a resume."""


class Preemption:
    """On SIGTERM or Ctrl-C, finish the running program, save, and exit with EXIT_PREEMPTED.

    with Preemption() as preemption:
        for step in ...:
            preemption.check(f'the rollout of step {step}')  # raises Interrupted
            ...
            if preemption.any_requested():
                save and return EXIT_PREEMPTED
    """

    def __init__(
        self,
        signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT),
        last: Callable[[], None] = lambda: None,
        *,
        silent: bool = False,
    ):
        """last: called before a second Ctrl-C ends the process. silent: do not report signals."""
        self._signals, self._last, self._silent = signals, last, silent
        self._previous: dict[int, Any] = {}
        self.requested = False  # in this process; see any_requested() for all
        self.phase = 'the start'  # the current phase; a stop waits for its end
        self._interrupts = 0

    def __enter__(self) -> 'Preemption':
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: types.FrameType | None) -> None:
        # Launchers repeat SIGTERM; a second one must not interrupt the save.
        first, self.requested = not self.requested, True
        self._interrupts += number == signal.SIGINT
        if self._silent:
            return
        # Not print(): the signal may have interrupted one.
        if self._interrupts > 1:
            os.write(2, b'\nstopped at once: what was not saved is lost\n')
            self._last()
            os._exit(128 + number)
        if first:
            os.write(2, f'\n{self.notice()}\n'.encode())

    def notice(self) -> str:
        """The message after the first signal."""
        return (
            f'stopping: waiting for {self.phase} to finish, then saving; '
            'a second Ctrl-C quits without saving'
        )

    def any_requested(self) -> bool:
        """Whether any process received a signal. All must call; all get the same answer.

        Gathers one byte per process, so no process exits while another waits in a collective.
        jax's sync point would need its own SIGTERM handler and would stop one step later.
        """
        return bool(np.any(gather(np.array([self.requested]))))

    def check(self, phase: str) -> None:
        """Raise Interrupted in all processes if any received a signal; else start `phase`."""
        self.phase = phase
        if self.any_requested():
            raise Interrupted

    def can_stop_now(self) -> bool:
        """Whether this process received a signal and can stop in the middle of a rollout.

        With several processes it cannot: its peers would wait for it in a collective.
        """
        return self.requested and jax.process_count() == 1


def go_on(phase: str) -> None:
    """A no-op replacement of Preemption.check, for callers that are never stopped."""


class CompileCounter:
    """Counts programs that XLA compiled, or loaded from the persistent cache, since __enter__.

    A jitted call with known shapes adds nothing, so a constant `count` after warm-up means that no
    step recompiles. Operations outside jit count too: each is a small program. Subclasses may
    override begun and done, which the compiling thread calls with the name of the jitted function.
    """

    def __init__(self):
        self.count, self.seconds = 0, 0.0
        self._running: tuple[str, float] | None = None

    def begun(self, name: str) -> None:
        """Called before a program is compiled."""

    def done(self, name: str, seconds: float) -> None:
        """Called after a program was compiled."""

    def __enter__(self) -> Self:
        jax.monitoring.register_scalar_listener(self._listen_begin)
        jax.monitoring.register_event_duration_secs_listener(self._listen_end)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_scalar_listener(self._listen_begin)
        jax.monitoring.unregister_event_duration_listener(self._listen_end)

    def running(self) -> tuple[str, float]:
        """(name, seconds so far) of the program being compiled; ('', 0.0) without one."""
        program = self._running
        return ('', 0.0) if program is None else (program[0], time.monotonic() - program[1])

    def _listen_begin(self, event: str, value: float, *, fun_name: str = '', **_) -> None:
        if event == COMPILE_EVENT:
            name = re.sub(r'^jit[(_]|\)$', '', fun_name)
            self._running = (name, time.monotonic())
            self.begun(name)

    def _listen_end(self, event: str, duration: float, **_) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
            self.seconds += duration
            if self._running is not None:
                (name, _), self._running = self._running, None
                self.done(name, duration)


def keep_programs(folder: pathlib.Path, parameters: int) -> None:
    """Cache what a large model compiles in a folder, unless JAX_COMPILATION_CACHE_DIR names one."""
    if parameters < KEEP_FROM or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    compilation_cache.reset_cache()  # imports have already initialised it
    if jax.process_index() == 0:
        print(f'compiled programs are kept in {folder}', file=sys.stderr, flush=True)


def barrier(name: str) -> None:
    """Wait until all processes have called this."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather(x: np.ndarray) -> np.ndarray:
    """Stack the arrays of all processes, [P, ...], on every host."""
    if jax.process_count() == 1:
        return np.asarray(x)[None]
    return np.asarray(multihost_utils.process_allgather(x))


def fetch(x: jax.Array) -> np.ndarray:
    """Return the full array on every host."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)
