"""Shared test settings: eight fake CPU devices, strict rank promotion, no accelerator."""

import os
import signal

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Children inherit signals that are ignored, as they are under nohup and in a shell's background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
