"""Shared test settings: eight fake CPU devices, strict rank promotion, programs shared by all.

Nearly all time goes into compiling. So XLA does it quickly rather than well, and what one process
compiled the others load: the workers of pytest-xdist, and the programs that tests start.
"""

import gc
import os
import shutil
import signal
import tempfile

# LLVM gets plain loops and optimises nothing: a quarter of the time that a program takes otherwise.
QUICK_TO_COMPILE = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false'
PROGRAMS = 'JAX_COMPILATION_CACHE_DIR'


def pytest_configure(config):
    if not hasattr(config, 'workerinput'):  # workers inherit what the first process sets
        prepare(config)
    import jax  # reads the environment

    jax.config.update('jax_num_cpu_devices', 8)
    jax.config.update('jax_numpy_rank_promotion', 'raise')
    gc.set_threshold(200_000, 20, 100)  # tracing makes many small objects and hardly any garbage

    # Children inherit signals that are ignored, as under nohup and in a shell's background.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def prepare(config):
    """The environment of all processes, with a folder for programs that goes when they end."""
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['XLA_FLAGS'] = f'{QUICK_TO_COMPILE} {os.environ.get("XLA_FLAGS", "")}'
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
    if PROGRAMS not in os.environ:
        os.environ[PROGRAMS] = tempfile.mkdtemp(prefix='agentrl_jax_programs_')
        config.add_cleanup(lambda: shutil.rmtree(os.environ[PROGRAMS]))
