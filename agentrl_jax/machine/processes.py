"""What a run needs around the program: processes, preemption, compile counts, a usable workdir."""

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
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from agentrl_jax.machine import files, lock

COORDINATOR, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
JOIN = (COORDINATOR, COUNT, INDEX)  # environment variables of a run of several processes
DEVICES = 'JAX_LOCAL_DEVICE_IDS'  # environment variable of jax: the GPUs of a process
HEARTBEAT = 'AGENTRL_HEARTBEAT_S'  # environment variable: seconds of silence after which it is dead
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: state is saved, start the same command again
EXIT_DAMAGED = 65  # EX_DATAERR: the newest checkpoint is damaged; --fallback takes an older one
PATIENCE_S = 20.0  # until what one host writes is seen by the others
COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


class Launcher(NamedTuple):
    """What starts the processes of a run: the environment variables by which each knows itself."""

    name: str
    count: str
    index: str
    local_index: str  # on its host
    address: str  # from which jax takes the address of the first process
    method: str  # jax's name for doing so


# mpirun comes first: it starts its daemons by srun, and its processes inherit their variables.
LAUNCHERS = (
    Launcher(
        name='mpirun',
        count='OMPI_COMM_WORLD_SIZE',
        index='OMPI_COMM_WORLD_RANK',
        local_index='OMPI_COMM_WORLD_LOCAL_RANK',
        address='OMPI_MCA_orte_hnp_uri',  # up to OpenMPI 4
        method='ompi',
    ),
    # SLURM_NTASKS is no sign: a batch script and a shell of salloc have it, and no peers.
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
    """The launcher that started this process and others with it."""
    for launcher in LAUNCHERS:
        if launcher.count in os.environ and launcher.index in os.environ:
            return launcher if _number(launcher.count) > 1 else None
    return None


def initialize_distributed(*, timeout_s: int = 300) -> None:
    """Join the processes of a run; call it before anything else touches jax.

    The environment names them (JOIN), or the launcher that started several (LAUNCHERS); else a run
    is one process. With JAX_NUM_PROCESSES=1 alone it is one whatever started it. The address 'auto'
    lets jax ask the cluster (TPU slices). Collectives on CPU go over gloo. A process without a
    heartbeat for AGENTRL_HEARTBEAT_S seconds (100) counts as dead, and the others end.
    """
    # jax would handle SIGTERM from here on, and no one would notice it before training begins.
    jax.config.update('jax_enable_preemption_service', False)
    silence_s = _number(HEARTBEAT) if HEARTBEAT in os.environ else 0
    patience = {
        'initialization_timeout': timeout_s,
        'heartbeat_timeout_seconds': silence_s or 100,
    }
    given, launcher = {name for name in JOIN if name in os.environ}, launched()
    if COORDINATOR in given and os.environ[COORDINATOR] == 'auto':
        del os.environ[COORDINATOR]  # jax would take the word for an address
        jax.distributed.initialize(**patience)
        return
    if (given == {COUNT} and os.environ[COUNT] == '1') or not (given or launcher):
        return
    missing = [name for name in JOIN if name not in given]
    if missing and launcher is None:
        raise ValueError(
            f'a run of several processes needs {", ".join(JOIN)}; not set: {", ".join(missing)}'
        )
    count = _number(COUNT if COUNT in given else launcher.count)
    if missing and DEVICES not in os.environ and launcher.local_index in os.environ:
        os.environ[DEVICES] = os.environ[launcher.local_index]  # as jax where it knows both
    if COORDINATOR in given:
        coordinator = os.environ[COORDINATOR]
        where = f'at {coordinator}'
    elif launcher.address in os.environ:  # jax finds the address from the launcher's variables
        coordinator, where = None, f'of {launcher.name}'
        patience['cluster_detection_method'] = launcher.method
    else:
        raise ValueError(
            f'{launcher.name} started {count} processes, and jax cannot tell where the first of '
            f'them is: set {COORDINATOR}=HOST:PORT, the same for all, if they are one run; '
            f'{COUNT}=1 if each is a run of its own'
        )
    index = _number(INDEX if INDEX in given else launcher.index)
    if not 0 <= index < count:
        raise ValueError(f'{INDEX}={index} must be in 0..{count - 1}')
    print(  # for jax aborts one that has waited in vain, and reports that another one died
        f'process {index} of {count} waits for the others {where}, for {timeout_s} s at most',
        file=sys.stderr,
        flush=True,
    )
    jax.distributed.initialize(coordinator, count, index, **patience)


def _number(name: str) -> int:
    """A whole number of the environment."""
    if not os.environ[name].isdigit():
        raise ValueError(f'{name}={os.environ[name]!r} must be a whole number')
    return int(os.environ[name])


def fail(error: Exception, code: int = 1, *, workdir: str | os.PathLike | None = None) -> NoReturn:
    """Ends a program that cannot go on: with one line for ValueError and OSError, else a traceback.

    It ends at once, for a normal exit waits: for threads whose work has failed, and one of several
    processes for the others, which wait for it in a collective. Collectives of a process that has
    ended fail in the others. workdir: where the program writes, see files.in_words.
    """
    if not isinstance(error, (ValueError, OSError)):
        traceback.print_exception(error)
    print(f'error: {files.in_words(error, workdir)}', file=sys.stderr)
    if jax.process_count() > 1:
        print(
            f'process {jax.process_index()} of {jax.process_count()} ends; if another one did so '
            'first, its output says why. The same command in all of them goes on from the newest '
            'checkpoint',
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def only_training(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """The workdir, made if need be, for this training alone: process 0 holds it for all of them.

    Where another training has it, or the processes see different folders, it is a ValueError in
    all of them. A folder that was made and stayed empty goes again.
    """
    made = not files.local_path(path).expanduser().exists()
    workdir = files.check_workdir(path)
    held = refused = None
    if jax.process_index() == 0:
        try:
            held = lock.take(workdir)
        except ValueError as error:
            refused = error
    try:
        if jax.process_count() > 1:
            token = int(gather(np.uint32(zlib.crc32(held.token.encode()) if held else 0))[0])
            if token:
                check_shared(workdir, token)
            elif refused is None:
                raise ValueError(f'{workdir} is in use by another training, says process 0')
        if refused:
            raise refused
        yield workdir
    finally:
        if held is not None:
            held.release()
        if made:
            with contextlib.suppress(OSError):
                workdir.rmdir()


def check_shared(workdir: pathlib.Path, token: int) -> None:
    """ValueError in all processes unless all see the lease of process 0; token: its CRC-32."""
    tried, seen = time.monotonic(), False
    while not seen and time.monotonic() < tried + PATIENCE_S:
        lease = lock.read_lease(workdir)
        seen = lease is not None and zlib.crc32(lease['token'].encode()) == token
        time.sleep(0 if seen else 0.2)
    if not gather(np.array(seen)).all():
        raise ValueError(
            f'{workdir} is not one folder that all processes see: name one on a disk that they '
            f'share, or in a bucket (gs://...), or set {COUNT}=1 if each is a run of its own'
        )


class Interrupted(Exception):
    """The run was asked to stop: what it was computing is discarded and computed after a resume."""


class Preemption:
    """SIGTERM and Ctrl-C mean: let the running program end, save, leave with EXIT_PREEMPTED.

    with Preemption() as preemption:
        for step in ...:
            preemption.check(f'the rollout of step {step}')  # raises Interrupted
            ...
            if preemption.agreed():
                save and return EXIT_PREEMPTED
    """

    def __init__(
        self,
        signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT),
        last: Callable[[], None] = lambda: None,
        *,
        silent: bool = False,
    ):
        """last: called before a second Ctrl-C ends the process. silent: others report signals."""
        self._signals, self._last, self._silent = signals, last, silent
        self._previous: dict[int, Any] = {}
        self.requested = False  # of this process; agreed() speaks for all
        self.phase = 'the start'  # what runs now, and a stop waits for
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
        # Not by print: the signal may have come in the middle of one.
        if self._interrupts > 1:
            os.write(2, b'\nstopped at once: what was not saved is lost\n')
            self._last()
            os._exit(128 + number)
        if first:
            os.write(2, f'\n{self.notice()}\n'.encode())

    def notice(self) -> str:
        """The answer to the first signal."""
        return (
            f'stopping: waiting for {self.phase} to end, then saving; '
            'a second Ctrl-C quits without saving'
        )

    def agreed(self) -> bool:
        """Whether any process was asked to stop: the same answer in all, if all call it.

        One byte per process is gathered, so nobody leaves while another waits in a collective.
        jax's own sync point needs its own SIGTERM handler and stops one step later.
        """
        return bool(np.any(gather(np.array([self.requested]))))

    def check(self, phase: str) -> None:
        """Raise Interrupted in all processes if any was asked to stop; `phase` is what follows."""
        self.phase = phase
        if self.agreed():
            raise Interrupted

    def may_leave(self) -> bool:
        """Whether this process was asked to stop and may do so in the middle of a rollout.

        One of several cannot: the others would wait for it in a collective.
        """
        return self.requested and jax.process_count() == 1


def go_on(phase: str) -> None:
    """Preemption.check for callers that are never stopped."""


class CompileCounter:
    """Counts the programs that XLA compiled, or fetched from the persistent cache, since enter.

    A jitted call with known shapes adds nothing, so a constant `count` after warm-up shows that no
    step recompiles. Operations outside jit count too: each is a small program. The thread that
    compiles calls begun(name) and done(name, seconds); name: of the function that was jitted.
    """

    def __init__(
        self,
        begun: Callable[[str], None] = lambda name: None,
        done: Callable[[str, float], None] = lambda name, seconds: None,
    ):
        self.count, self.seconds = 0, 0.0
        self._begun, self._done = begun, done
        self._running: tuple[str, float] | None = None

    def __enter__(self) -> 'CompileCounter':
        jax.monitoring.register_scalar_listener(self._listen_begin)
        jax.monitoring.register_event_duration_secs_listener(self._listen_end)
        return self

    def __exit__(self, *_) -> None:
        jax.monitoring.unregister_scalar_listener(self._listen_begin)
        jax.monitoring.unregister_event_duration_listener(self._listen_end)

    def running(self) -> tuple[str, float]:
        """(program, seconds so far) of the one that is being compiled; ('', 0) of none."""
        found = self._running
        return ('', 0.0) if found is None else (found[0], time.monotonic() - found[1])

    def _listen_begin(self, event: str, value: float, *, fun_name: str = '', **_) -> None:
        if event == COMPILE_EVENT:
            name = re.sub(r'^jit[(_]|\)$', '', fun_name)
            self._running = (name, time.monotonic())
            self._begun(name)

    def _listen_end(self, event: str, duration: float, **_) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
            self.seconds += duration
            if self._running is not None:
                (name, _), self._running = self._running, None
                self._done(name, duration)


def barrier(name: str) -> None:
    """Returns when all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather(x: np.ndarray) -> np.ndarray:
    """An array of each process, [P, ...], on every host."""
    if jax.process_count() == 1:
        return np.asarray(x)[None]
    return np.asarray(multihost_utils.process_allgather(x))


def fetch(x: jax.Array) -> np.ndarray:
    """The whole array on every host."""
    if jax.process_count() == 1:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)
