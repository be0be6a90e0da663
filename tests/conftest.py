"""Shared test settings: eight fake CPU devices, strict rank promotion, no accelerator."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
