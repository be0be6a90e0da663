"""Checkpoints restore bit for bit on any mesh, and errors name the damaged or missing part."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import updates
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import checkpoint, files, processes, sharding
from agentrl_jax.types import TrainState


def make_state(seed: int = 0, width: int = 16) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        'embed': {'weight': jax.random.normal(keys[0], (8, width))},
        'norm': {'weight': jax.random.normal(keys[1], (width,)).astype(jnp.bfloat16)},
    }
    tx = optax.adamw(1e-3)
    critic = {'value_head': {'kernel': jax.random.normal(keys[2], (width, 1))}}
    return updates.state(tx, params, critic, step=jnp.int32(seed))


def abstract(state, layout=None):
    return sharding.with_layout(state, layout) if layout else sharding.abstract_of(state)


def bits(x) -> bytes:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        assert bits(g) == bits(w)


@pytest.fixture
def ckpts(tmp_path):
    opened = checkpoint.open_checkpoints(tmp_path, keep=2)
    yield opened
    checkpoint.close(opened)


def test_state_and_extra_come_back_bit_for_bit(ckpts):
    """Including typed keys, nans and negative zeros."""
    state = {
        'run': make_state(3),
        'key': jax.random.key(7),
        'keys': jax.random.split(jax.random.key(8, impl='rbg'), 2),
        'odd': jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32),
        'bf16': jnp.array([1 / 3, -0.0], jnp.bfloat16),
        'flags': jnp.array([True, False]),
        'bytes': jnp.array([0, 255], jnp.uint8),
    }
    extra = {'config': {'lr': 1e-6, 'name': 'x'}, 'cursor': [1, None], 'mesh': {}}
    assert checkpoint.latest_step(ckpts) is None
    assert checkpoint.save(ckpts, 3, state, extra)
    got, got_extra = checkpoint.restore(ckpts, abstract(state))
    assert_same_bits(got, state)
    assert got_extra == extra and checkpoint.latest_step(ckpts) == 3


def test_donating_the_state_right_after_save_does_not_change_the_checkpoint(ckpts):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ('fsdp',))
    placed = NamedSharding(mesh, P('fsdp'))
    state = {'w': jax.device_put(jnp.zeros((512, 2048)), placed)}
    add = jax.jit(lambda s: {'w': s['w'] + 1}, donate_argnums=0)
    checkpoint.save(ckpts, 0, state, {})
    for _ in range(20):
        state = add(state)
    got, _ = checkpoint.restore(ckpts, abstract(state))
    assert float(jnp.abs(got['w']).max()) == 0.0


def test_another_mesh_restores_exactly(ckpts):
    devices = np.array(jax.devices())
    wide = jax.sharding.Mesh(devices.reshape(4, 2), ('fsdp', 'tensor'))
    tall = jax.sharding.Mesh(devices.reshape(2, 4), ('fsdp', 'tensor'))
    w = jax.random.normal(jax.random.key(0), (16, 8))
    state = {'w': jax.device_put(w, NamedSharding(wide, P('fsdp', 'tensor')))}
    checkpoint.save(ckpts, 0, state, {})
    for layout in (NamedSharding(tall, P('tensor', 'fsdp')), SingleDeviceSharding(devices[0])):
        got, _ = checkpoint.restore(ckpts, abstract(state, layout))
        assert got['w'].sharding == layout and bits(got['w']) == bits(w)


def test_keeps_the_last_steps_and_ignores_a_second_save_of_a_step(ckpts):
    for step in range(1, 5):
        assert checkpoint.save(ckpts, step, {'w': jnp.full((2,), step)}, {'n': step})
    assert not checkpoint.save(ckpts, 4, {'w': jnp.zeros(2)}, {'n': 2})
    got, extra = checkpoint.restore(ckpts, {'w': jax.ShapeDtypeStruct((2,), jnp.int32)})
    assert extra == {'n': 4} and got['w'][0] == 4
    assert checkpoint.steps(ckpts.directory) == [3, 4]
    checkpoint.remove_from(ckpts, 4)
    assert checkpoint.steps(ckpts.directory) == [3]
    with pytest.raises(ValueError, match='keep=0 must be at least 1'):
        checkpoint.open_checkpoints(ckpts.directory.parent, keep=0)


def test_evaluation_reads_only_the_parameters(ckpts):
    state = make_state(1)
    checkpoint.save(ckpts, 1, state, {'config': {'a': 1}})
    checkpoint.wait(ckpts)
    workdir = ckpts.directory.parent
    for path in (workdir, ckpts.directory, ckpts.directory / '1'):
        assert_same_bits(checkpoint.load_params_only(path, abstract(state.params)), state.params)
        assert checkpoint.read_extra(path) == {'config': {'a': 1}}


def test_errors_name_the_wrong_leaves(ckpts):
    checkpoint.save(ckpts, 0, {'a': {'b': jnp.ones((2, 3))}, 'c': jnp.ones(4)}, {})
    f32 = jnp.float32
    for name, b in (
        ('b', jax.ShapeDtypeStruct((3, 2), f32)),
        ('b', jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)),  # Orbax casts silently
        ('d', jax.ShapeDtypeStruct((), f32)),
    ):
        with pytest.raises(ValueError, match=rf'a\.{name} is '):
            checkpoint.restore(ckpts, {'a': {name: b}, 'c': jax.ShapeDtypeStruct((4,), f32)})


def test_reads_checkpoints_from_before_empty_fields_and_the_extra_field(ckpts):
    """TrainState has new empty fields, and snapshots have moved into `extra`."""
    snapshots = ({'w': jnp.arange(2.0)}, {'w': jnp.ones(2)})
    step = jnp.int32(3)
    checkpoint.save(ckpts, 3, {'step': step, 'gone': (), 'snapshots': snapshots}, {})
    newer = {'step': step, 'explorer': None, 'other': (), 'extra': {'snapshots': snapshots}}
    state, _ = checkpoint.restore(ckpts, abstract(newer))
    assert_same_bits(state, newer)


def test_missing_checkpoints_are_errors(ckpts):
    shapes = {'w': jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(ckpts, shapes)
    checkpoint.save(ckpts, 4, {'w': jnp.ones(2)}, {})
    with pytest.raises(FileNotFoundError, match='step 5'):
        checkpoint.restore(ckpts, shapes, step=5)
    with pytest.raises(FileNotFoundError, match='nowhere'):
        checkpoint.load_params_only(ckpts.directory / 'nowhere', shapes)


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_saves_leak_no_descriptors_or_threads(ckpts):
    """Previously each save kept three descriptors and a thread: with 96, a run died at save 24."""
    open_counts = []  # after each save
    for step in range(16):
        checkpoint.save(ckpts, step, {'w': jnp.arange(1000.0)}, {'step': step})
        checkpoint.wait(ckpts)
        open_counts.append((len(os.listdir('/proc/self/fd')), threading.active_count()))
    (files_then, threads_then), (files_now, threads_now) = open_counts[7], open_counts[15]
    assert files_now < files_then + 3 and threads_now < threads_then + 3


def test_half_written_steps_are_ignored_and_written_again(tmp_path):
    folder = tmp_path / checkpoint.FOLDER
    for leftover in ('7.orbax-checkpoint-tmp/state', '6.new', '5.removed'):
        (folder / leftover).mkdir(parents=True)
    (folder / '8').mkdir()  # created by hand: Orbax only renames complete steps
    opened = checkpoint.open_checkpoints(tmp_path, keep=3)
    assert checkpoint.latest_step(opened) is None
    assert [path.name for path in folder.iterdir()] == ['8']
    for step in (7, 8):
        assert checkpoint.save(opened, step, {'w': jnp.full((2,), step)}, {})
    checkpoint.close(opened)
    assert checkpoint.steps(folder) == [7, 8]


KILLED = """
import sys, jax.numpy as jnp
from agentrl_jax.machine import checkpoint
ckpts = checkpoint.open_checkpoints(sys.argv[1], keep=2)
for step in range(1, 1000):
    checkpoint.save(ckpts, step, {'w': jnp.full((1000, 1000), step, jnp.float32)}, {'step': step})
    print(step, flush=True)
"""


@pytest.mark.soak
def test_kill_9_while_saving_leaves_a_complete_latest_step(tmp_path):
    shapes = {'w': jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    reached = 0
    for delay_s in (0.0, 0.02):  # after the start of the third save
        child = subprocess.Popen(
            [sys.executable, '-c', KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for line in child.stdout:
            if int(line) >= reached + 3:
                break
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        opened = checkpoint.open_checkpoints(tmp_path, keep=2)
        state, extra = checkpoint.restore(opened, shapes)
        latest = checkpoint.latest_step(opened)
        assert latest >= reached + 2 and extra == {'step': latest}
        assert bool((state['w'] == latest).all())
        assert [p.name for p in opened.directory.iterdir() if not p.name.isdigit()] == []
        reached = latest
        checkpoint.close(opened)


def test_a_full_or_unwritable_workdir_is_detected_before_writing(ckpts, tmp_path, monkeypatch):
    with pytest.raises(OSError, match='needs 1000000000.00 GB'):
        files.check_workdir(tmp_path / 'new', min_free_bytes=10**18)
    assert list((tmp_path / 'new').iterdir()) == []
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match=str(tmp_path / 'file' / 'run')):
        checkpoint.open_checkpoints(tmp_path / 'file' / 'run', keep=1)
    usage = checkpoint.shutil.disk_usage(ckpts.directory)
    monkeypatch.setattr(checkpoint.shutil, 'disk_usage', lambda _: usage._replace(free=100))
    with pytest.raises(OSError, match='4,000 bytes needed') as caught:
        checkpoint.save(ckpts, 1, {'w': jnp.ones(1000)}, {})
    assert caught.value.errno == errno.ENOSPC


def test_a_different_config_is_rejected_field_by_field():
    saved = {'steps': 10, 'loss': {'clip': 0.2, 'kl': 0.0}, 'mesh': {'shape': [1, 2]}}
    checkpoint.check_config(saved, {**saved, 'mesh': {'shape': (1, 2)}})
    now = {'steps': 20, 'loss': {'clip': 0.28}, 'mesh': {'shape': [1, 2]}}
    with pytest.raises(ValueError, match='loss.clip: 0.2 .*loss.kl: 0.0 .* absent now$') as caught:
        checkpoint.check_config(saved, now, may_differ=('steps',))
    assert 'steps' not in str(caught.value)
    checkpoint.check_config(saved, now, may_differ=('steps', 'loss'))
    assert files.config_hash({'a': 1, 'b': 2}) == files.config_hash({'b': 2, 'a': 1})


def test_compiles_are_counted_and_known_shapes_add_none(ckpts):
    double = jax.jit(lambda x: x * 2)
    small, large = jnp.ones(5), jnp.ones(6)
    with processes.CompileCounter() as compiles:
        double(small)
        assert compiles.count == 1
        double(small)
        checkpoint.save(ckpts, 0, {'x': small}, {})
        checkpoint.wait(ckpts)
        assert compiles.count == 1
        double(large)
        assert compiles.count == 2
    jax.jit(lambda x: x * 3)(small)
    assert compiles.count == 2 and compiles.seconds > 0


def test_sigterm_requests_one_stop_and_handlers_are_restored(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with processes.Preemption() as preemption:
        assert not preemption.any_requested() and not preemption.can_stop_now()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.any_requested() and preemption.can_stop_now()
        with monkeypatch.context() as patch:
            patch.setattr(jax, 'process_count', lambda: 2)
            assert not preemption.can_stop_now()  # the second process would wait for this one
    assert signal.getsignal(signal.SIGTERM) is before
