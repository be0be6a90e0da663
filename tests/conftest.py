"""Shared test settings: eight fake CPU devices, strict rank promotion, shared programs.

Compilation takes nearly all the time. So XLA compiles quickly rather than well, and processes share
the compiled programs: the workers of pytest-xdist, subprocesses of tests, and the next session.
JAX_COMPILATION_CACHE_DIR replaces the folder .pytest_cache/d/programs_*.
"""

import ctypes
import dataclasses
import gc
import hashlib
import os
import pathlib
import platform
import shutil
import signal

import folders  # noqa: F401
import hypothesis
import pytest
import quick_xla

PROGRAMS = 'JAX_COMPILATION_CACHE_DIR'
MOST_BYTES = 2**30  # of cached programs; one session adds about 150 MB
BUILT = {}  # builds of this worker, by config and mesh: see shared_programs
MOST_RESIDENT = 7 * 2**28  # bytes at the start of a test file; the longest adds half of it
MOST_PIECES = 20_000  # memory maps at the start of a test file; the longest adds 20,000
PIECES = pathlib.Path('/proc/self/maps')
# glibc keeps freed memory: a process that was full once would drop its programs after every file.
TRIM = getattr(ctypes.CDLL(None), 'malloc_trim', int)
# The slowest files, which run first, so that no worker is left with one of them at the end.
LONGEST = (
    'distributed_training runs resume openings update lora grammar tables experiments host_runs '
    'tpu_scripts saved_config rollout context self_play forks'
).split()
# Files that import one of these train, play rollouts or start processes; `make check` skips them.
LONG = set(
    'build clone collecting device evaluate harness_clients host_worlds subprocess tiny_agents '
    'toy_rollouts train update updates'.split()
)


def pytest_configure(config):
    if not hasattr(config, 'workerinput'):  # workers inherit the settings of the first process
        os.environ['JAX_PLATFORMS'] = 'cpu'
        os.environ['XLA_FLAGS'] = f'{quick_xla.FLAGS} {os.environ.get("XLA_FLAGS", "")}'
        os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
        os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
        if PROGRAMS not in os.environ:
            os.environ[PROGRAMS] = str(kept_programs(config))
    import jax  # reads the environment

    # Examples are always the same; HYPOTHESIS_PROFILE=default draws new ones every time.
    hypothesis.settings.register_profile('same', derandomize=True)
    hypothesis.settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'same'))
    jax.config.update('jax_num_cpu_devices', 8)
    jax.config.update('jax_numpy_rank_promotion', 'raise')
    gc.set_threshold(200_000, 20, 100)  # tracing creates many small objects but little garbage

    # Children inherit ignored signals, as under nohup and in a shell's background.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kept_programs(config):
    """Return the folder of programs for this processor type; it is cleared if it is too large.

    JAX's key of a program covers everything else that it depends on. If a killed process left a
    truncated file, JAX warns and compiles.
    """
    about = pathlib.Path('/proc/cpuinfo')
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    kind = sorted({line for line in lines if line.startswith(('model name', 'flags'))} or lines)
    name = hashlib.sha256('\n'.join(kind).encode()).hexdigest()[:8]
    folder = config.cache.mkdir(f'programs_{name}')
    if sum(path.stat().st_size for path in folder.iterdir()) > MOST_BYTES:
        shutil.rmtree(folder)
    return folder


def build_key(cfg):
    """Return a key; configs with the same key have the same parts and programs."""
    fields = cfg.to_dict()
    unused = dict.fromkeys(('steps', 'checkpoint', 'log'))
    return repr({**fields, **unused, 'eval': {**fields['eval'], 'every': None}})


@pytest.fixture(scope='module')
def shared_programs():
    """Trace the programs of a config once per session of a worker.

    This covers runs of any length and in any file. The value is the original build function, as a
    separate process has it.
    """
    from agentrl_jax import train
    from agentrl_jax.run import parts
    from agentrl_jax.run.config import effective, read

    build = train.build

    def build_once(cfg, **how):
        cfg = effective(cfg)
        key = build_key(cfg), parts.build_mesh(read(cfg, None))
        if key not in BUILT:
            BUILT[key] = build(cfg, **how)
        return dataclasses.replace(BUILT[key], config=read(cfg, None), config_dict=cfg)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'build', build_once)
        yield build


@pytest.fixture(scope='module')
def one_device():
    """Use only the first device, which is faster; the value builds other meshes."""
    import micro_runs

    with micro_runs.one_device() as make:
        yield make


@pytest.fixture(scope='module')
def quick_runs(one_device, shared_programs):
    """Skip slow parts of runs that are tested elsewhere: the mesh and plots."""
    from agentrl_jax.records import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, 'write_curves', lambda workdir, title: None)
        yield


@pytest.hookimpl(trylast=True)  # after fixtures have released their programs
def pytest_runtest_teardown(item, nextitem):
    """Drop the programs of a worker between files if it holds many.

    Each program has several memory maps, and Linux limits a process to 65,530 (vm.max_map_count).
    Beyond that, XLA crashes during compilation without an error message.
    """
    if nextitem is None or nextitem.path == item.path or not PIECES.exists():
        return
    if holds_many():
        TRIM(0)
    if holds_many():
        import jax

        BUILT.clear()
        jax.clear_caches()
        gc.collect()
        TRIM(0)


def holds_many():
    resident = int(PIECES.with_name('statm').read_text().split()[1]) * 4096
    return PIECES.read_bytes().count(b'\n') > MOST_PIECES or resident > MOST_RESIDENT


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == 'runs' or LONG & vars(item.module).keys():
            item.add_marker('trains')
    order = {f'test_{name}': index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
