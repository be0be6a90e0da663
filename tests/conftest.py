"""Shared test settings: eight fake CPU devices, strict rank promotion, programs shared by all.

Nearly all time goes into compiling. So XLA does it quickly rather than well, and what one process
compiled the others load: the workers of pytest-xdist, the programs that tests start, and the next
session. JAX_COMPILATION_CACHE_DIR names another folder than .pytest_cache/d/programs_*.
"""

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
MOST_BYTES = 2**30  # of kept programs; one session makes about 150 MB
BUILT = {}  # what this worker has built, by config and mesh: see shared_programs
MOST_PIECES = 20_000  # of memory, when a file of tests begins; the longest asks for 20,000 more
# Files that take longest, first, so that no worker is left alone with one of them at the end.
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
    if not hasattr(config, 'workerinput'):  # workers inherit what the first process sets
        os.environ['JAX_PLATFORMS'] = 'cpu'
        os.environ['XLA_FLAGS'] = f'{quick_xla.FLAGS} {os.environ.get("XLA_FLAGS", "")}'
        os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
        os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
        if PROGRAMS not in os.environ:
            os.environ[PROGRAMS] = str(kept_programs(config))
    import jax  # reads the environment

    # Everybody draws the same examples; HYPOTHESIS_PROFILE=default draws others every time.
    hypothesis.settings.register_profile('same', derandomize=True)
    hypothesis.settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'same'))
    jax.config.update('jax_num_cpu_devices', 8)
    jax.config.update('jax_numpy_rank_promotion', 'raise')
    gc.set_threshold(200_000, 20, 100)  # tracing makes many small objects and hardly any garbage

    # Children inherit signals that are ignored, as under nohup and in a shell's background.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def kept_programs(config):
    """The folder of programs for this kind of processor; begun anew when it has grown too large.

    JAX's key of a program holds all else that it depends on. A file that a killed process left
    half-written is not read: JAX warns and compiles.
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
    """Configs with the same one have the same parts and programs."""
    fields = cfg.to_dict()
    unused = dict.fromkeys(('steps', 'checkpoint', 'log'))
    return repr({**fields, **unused, 'eval': {**fields['eval'], 'every': None}})


@pytest.fixture(scope='module')
def shared_programs():
    """train.train traces the programs of a config once in a session of a worker.

    However long a run is, and in whichever files it is asked for. The value is the build that a
    process of its own has.
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
    """Runs have the first device alone, which takes less time; the value makes other meshes."""
    import micro_runs

    with micro_runs.one_device() as make:
        yield make


@pytest.fixture(scope='module')
def quick_runs(one_device, shared_programs):
    """What takes time in a run and is looked at elsewhere is left out: a mesh, drawn curves."""
    from agentrl_jax.records import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, 'write_curves', lambda workdir, title: None)
        yield


@pytest.hookimpl(trylast=True)  # once fixtures have let go of their programs
def pytest_runtest_teardown(item, nextitem):
    """A worker that holds many programs drops them between files.

    Each is several pieces of memory, and Linux gives a process 65,530 (vm.max_map_count): XLA does
    not say that there are no more but crashes while it compiles.
    """
    pieces = pathlib.Path('/proc/self/maps')
    if nextitem is None or nextitem.path == item.path or not pieces.exists():
        return
    before = pieces.read_bytes().count(b'\n')
    if before > MOST_PIECES:
        import jax

        BUILT.clear()
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == 'runs' or LONG & vars(item.module).keys():
            item.add_marker('trains')
    order = {f'test_{name}': index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
