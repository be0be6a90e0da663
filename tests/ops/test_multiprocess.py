"""Several processes over gloo share checkpoints and stops, and do not wait for dead processes."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from agentrl_jax.machine import checkpoint
from agentrl_jax.machine import processes as runtime

ROOT = pathlib.Path(__file__).resolve().parents[2]

START = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
jax.config.update('jax_platforms', 'cpu')
from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.machine import processes as runtime
runtime.initialize_distributed(timeout_s=60)
from jax.sharding import NamedSharding, PartitionSpec as P
workdir = sys.argv[-1]
mesh = sharding.make_mesh(1, 2, 2)
assert jax.process_count() * len(jax.local_devices()) == mesh.size == 4
placed = {'w': NamedSharding(mesh, P('fsdp', 'tensor')), 'b': NamedSharding(mesh, P())}
init = jax.jit(
    lambda: {'w': jnp.arange(32.0).reshape(8, 4), 'b': jnp.zeros((), jnp.int32)},
    out_shardings=placed,
)
step_fn = jax.jit(
    lambda s: {'w': s['w'] + 1.0 / (1.0 + jnp.sum(s['w'] ** 2)), 'b': s['b'] + 1},
    out_shardings=placed, donate_argnums=0,
)
"""

SAVE_RESUME_AND_STOP = """
ckpts = checkpoint.open_checkpoints(workdir, keep=2)
state = init()
for _ in range(3):
    state = step_fn(state)
checkpoint.save(ckpts, 3, state, {'processes': 2})
for _ in range(2):
    state = step_fn(state)
direct = [np.asarray(x.data).tobytes() for x in state['w'].addressable_shards]
abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
)
resumed, extra = checkpoint.restore(ckpts, abstract)
assert extra == {'processes': 2} and int(resumed['b']) == 3
for _ in range(2):
    resumed = step_fn(resumed)
assert [np.asarray(x.data).tobytes() for x in resumed['w'].addressable_shards] == direct
step = 5
with runtime.Preemption() as preemption:
    while not preemption.any_requested():
        resumed, step = step_fn(resumed), step + 1
        print(step, flush=True)
        assert step < 3000
checkpoint.save(ckpts, step, resumed, {'processes': 2})
checkpoint.close(ckpts)
print('stopped', step, preemption.requested, flush=True)
sys.exit(runtime.EXIT_PREEMPTED)
"""


ADD_UP = """
try:
    with runtime.exclusive_workdir(workdir):
        print('sum', int(runtime.gather(np.array(1 + jax.process_index())).sum()), flush=True)
except ValueError as error:
    runtime.fail(error)
"""

TRAIN_ALONE = """
try:
    with runtime.exclusive_workdir(workdir):
        state = jax.block_until_ready(step_fn(init()))  # from here on they are connected
        print('trains', flush=True)
        while True:
            time.sleep(0.02)
            jax.block_until_ready(state := step_fn(state))
except (ValueError, RuntimeError) as error:
    runtime.fail(error)
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(('localhost', 0))
        return str(probe.getsockname()[1])


def variables_of(count: int) -> list[dict[str, str]]:
    """Return the environment variables that connect `count` processes."""
    address = f'localhost:{free_port()}'
    shared = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': str(count)}
    return [shared | {'JAX_PROCESS_ID': str(index)} for index in range(count)]


def launcher_variables(name: str, count: int) -> list[dict[str, str]]:
    """Return the variables that srun or mpirun (OpenMPI 4) sets for `count` processes of a host."""
    if name == 'mpirun':
        indices = ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK')
        counts, shared = ('OMPI_COMM_WORLD_SIZE',), {'OMPI_MCA_orte_hnp_uri': '1;tcp://127.0.0.1:3'}
    else:
        indices, counts = (
            ('SLURM_PROCID', 'SLURM_LOCALID'),
            ('SLURM_NTASKS', 'SLURM_STEP_NUM_TASKS'),
        )
        shared = {'SLURM_JOB_ID': '4711', 'SLURM_STEP_NODELIST': 'localhost'}
    shared |= {'JAX_COORDINATOR_PORT': free_port(), **dict.fromkeys(counts, str(count))}
    return [shared | dict.fromkeys(indices, str(i)) for i in range(count)]


def start(
    program: str, *arguments, joined: list[dict[str, str]] | None = None, **variables
) -> list[subprocess.Popen]:
    """Start the program in two processes with four devices in total.

    arguments: shared values, or lists with one value per process.
    """
    shared = dict(os.environ, PYTHONPATH=str(ROOT), JAX_NUM_CPU_DEVICES='2', **variables)
    return [
        subprocess.Popen(
            [
                *(sys.executable, '-c', START + program),
                *(str(each[index] if isinstance(each, list) else each) for each in arguments),
            ],
            env=shared | place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, place in enumerate(joined or variables_of(2))
    ]


def wait_for_line(process: subprocess.Popen, expected: str) -> None:
    """Wait until the process has printed the line; fail if it ends first."""
    assert any(line.strip() == expected for line in process.stdout)


def finish(processes: list[subprocess.Popen], *, code: int) -> list[str]:
    """Return the output of each process; always kill the remaining ones."""
    deadline = time.monotonic() + 90
    try:
        outputs = [p.communicate(timeout=deadline - time.monotonic())[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, outputs, strict=True):
        assert process.returncode == code, text
    return outputs


@pytest.fixture
def joins(monkeypatch):
    """Return a function: environment -> the (address, count, index, method) that jax joins."""

    def join(variables: dict[str, str]) -> tuple | None:
        joined = []

        def initialize(*place, cluster_detection_method=None, heartbeat_timeout_seconds, **_):
            assert heartbeat_timeout_seconds == 7
            joined.append((*place, cluster_detection_method))

        monkeypatch.setattr(jax.distributed, 'initialize', initialize)
        monkeypatch.setattr(os, 'environ', {**variables, runtime.HEARTBEAT: '7'})
        runtime.initialize_distributed()
        return joined[0] if joined else None

    return join


@pytest.mark.parametrize(('launcher', 'method'), [('srun', 'slurm'), ('mpirun', 'ompi')])
def test_processes_started_by_a_launcher_join(joins, launcher, method):
    """Previously each process trained a separate run, and only the workdir's lock noticed."""
    variables = launcher_variables(launcher, 8)[3]
    assert joins(variables) == (None, 8, 3, method)
    assert joins(variables | {'JAX_NUM_PROCESSES': '1'}) is None
    assert joins(variables | {'JAX_COORDINATOR_ADDRESS': 'a:1'}) == ('a:1', 8, 3, None)
    assert joins(variables | {'JAX_COORDINATOR_ADDRESS': 'auto'}) == (None,)
    assert 'JAX_COORDINATOR_ADDRESS' not in os.environ  # jax would read "auto" as an address
    override = {'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'}
    assert joins(variables | {'JAX_COORDINATOR_ADDRESS': 'a:1'} | override) == ('a:1', 2, 1, None)


JOB = {'SLURM_JOB_ID': '4711', 'SLURM_NTASKS': '8', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'}
STEP = {'SLURM_STEP_ID': '0', 'SLURM_STEP_NODELIST': 'node[1-8]'}
ONE_OF_MPI = {'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'}


@pytest.mark.parametrize(
    'variables',
    [
        {},
        {'SLURM_JOB_ID': '4711', 'SLURM_NTASKS': '8'},
        JOB | {'SLURM_ARRAY_TASK_ID': '2'},
        JOB | STEP | {'SLURM_STEP_NUM_TASKS': '1'},
        JOB | STEP | {'SLURM_STEP_NUM_TASKS': '8'} | ONE_OF_MPI,
    ],
    ids=['no cluster', 'salloc', 'batch script', 'a shell that is a step', 'mpirun -n 1'],
)
def test_a_single_process_does_not_wait_for_others(joins, variables):
    assert joins(variables) is None


def test_incomplete_or_wrong_variables_are_rejected(joins):
    variables, coordinator = {}, {'JAX_COORDINATOR_ADDRESS': 'localhost:1'}
    for more, field in (
        (coordinator, 'not set: JAX_NUM_PROCESSES, JAX_PROCESS_ID'),
        ({'JAX_PROCESS_ID': '2', 'JAX_NUM_PROCESSES': 'two'}, "JAX_NUM_PROCESSES='two'"),
        ({'JAX_NUM_PROCESSES': '2'}, 'JAX_PROCESS_ID=2'),
    ):
        variables |= more
        with pytest.raises(ValueError, match=field):
            joins(variables)


def test_a_launcher_that_does_not_provide_the_address_is_rejected(joins):
    """OpenMPI 5: its daemons are started by srun, so srun's variables are also set."""
    variables = launcher_variables('mpirun', 8)[3] | JOB | STEP | {'SLURM_STEP_NUM_TASKS': '4'}
    del variables['OMPI_MCA_orte_hnp_uri']
    with pytest.raises(ValueError, match='JAX_COORDINATOR_ADDRESS'):
        joins(variables)
    assert joins(variables | {'JAX_COORDINATOR_ADDRESS': 'a:1'}) == ('a:1', 8, 3, None)
    assert os.environ['JAX_LOCAL_DEVICE_IDS'] == '3'


@pytest.mark.soak
@pytest.mark.parametrize('launcher', ['srun', 'mpirun'])
def test_two_processes_connect_through_the_variables_of_a_launcher(launcher, tmp_path):
    outputs = finish(start(ADD_UP, tmp_path, joined=launcher_variables(launcher, 2)), code=0)
    assert all(text.endswith('sum 3\n') for text in outputs), outputs


@pytest.mark.soak
def test_joined_processes_with_different_workdirs_are_rejected(tmp_path):
    """Previously srun -n2 bash -c '... --workdir=runs/$SLURM_PROCID' was two separate runs."""
    workdirs = [tmp_path / '0', tmp_path / '1']
    program = f'runtime.PATIENCE_S = 1.0\n{ADD_UP}'
    for text in finish(start(program, workdirs, joined=launcher_variables('srun', 2)), code=1):
        assert 'is not the same folder for all processes' in text


def test_two_processes_write_one_checkpoint_and_stop_at_the_same_step(tmp_path):
    """One process gets the signal; a single process reads the checkpoint."""
    processes = start(SAVE_RESUME_AND_STOP, tmp_path)
    wait_for_line(processes[1], '9')
    processes[1].send_signal(signal.SIGTERM)
    outputs = finish(processes, code=runtime.EXIT_PREEMPTED)
    opened = checkpoint.open_checkpoints(tmp_path, keep=2)
    shapes = {'w': ((8, 4), np.float32), 'b': ((), np.int32)}
    abstract = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    state, extra = checkpoint.restore(opened, abstract)
    checkpoint.close(opened)
    first, last = checkpoint.steps(opened.directory)
    assert first == 3 and last >= 9 and int(state['b']) == last and extra == {'processes': 2}
    for index, text in enumerate(outputs):  # both processes stop, one got the signal
        assert text.endswith(f'stopped {last} {index == 1}\n')


def output_of_survivor(process: subprocess.Popen, *, within_s: float) -> str:
    """Return the survivor's output; it must end in time and with an error code."""
    try:
        text, _ = process.communicate(timeout=within_s)
    finally:
        process.kill()
    assert process.returncode not in (0, runtime.EXIT_PREEMPTED, -signal.SIGKILL), text
    return text


@pytest.mark.soak
def test_a_second_pair_is_rejected_and_a_process_ends_at_once_when_its_peer_is_killed(tmp_path):
    """The connection breaks, so the survivor need not wait for the heartbeat of 100 s."""
    first = start(TRAIN_ALONE, tmp_path)
    wait_for_line(first[1], 'trains')
    try:
        rejected = finish(start(TRAIN_ALONE, tmp_path), code=1)
        first[1].kill()
        text = output_of_survivor(first[0], within_s=60)
    finally:
        for process in first:
            process.kill()
            process.communicate()
    assert f'is in use by another run (process {first[0].pid} on ' in rejected[0]
    assert 'is in use by another run, according to process 0' in rejected[1]
    assert 'process 0 of 2 exits' in text and 'resume from the newest checkpoint' in text


@pytest.mark.soak
def test_the_other_process_ends_within_the_heartbeat_timeout_when_one_hangs(tmp_path):
    """A stopped process keeps its connections, so only the missing heartbeat reveals it."""
    processes = start(TRAIN_ALONE, tmp_path, AGENTRL_HEARTBEAT_S='5')
    wait_for_line(processes[0], 'trains')
    processes[0].send_signal(signal.SIGSTOP)
    try:
        text = output_of_survivor(processes[1], within_s=60)
    finally:
        processes[0].kill()
        processes[0].communicate()
    assert 'distributed service detected fatal errors' in text
