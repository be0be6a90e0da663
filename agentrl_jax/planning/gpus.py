"""Descriptions of GPUs that let XLA compile for one that is not attached.

Figures: openxla/xla, xla/backends/gpu/target_config/specs (h100_sxm, h200, a100_sxm_80).
"""

from typing import Any

from jax.experimental import topologies

PACKAGE, REQUIREMENTS = 'jax_cuda13_plugin', 'requirements/plan-gpu.txt'

# Fields of gpu_device_info that differ between GPUs: bytes, bytes per second, GHz and counts.
H100 = {
    'name': '"NVIDIA H100 80GB HBM3"',
    'device_memory_size': 84942979072,
    'memory_bandwidth': 3350000000000,
    'cuda_compute_capability': '{ major: 9 feature_extension: ACCELERATED_FEATURES }',  # sm_90a
    'core_count': 132,
    'fpus_per_core': 128,
    'clock_rate_ghz': 1.98,
    'shared_memory_per_core': 233472,
    'shared_memory_per_block_optin': 232448,  # the maximum that a block may request
    'l2_cache_size': 52428800,
}
H200 = {
    'name': '"NVIDIA H200 141GB HBM3e"',
    'device_memory_size': 151397597184,
    'memory_bandwidth': 4800000000000,
}
A100 = {
    'name': '"NVIDIA A100-SXM4-80GB"',
    'device_memory_size': 85100068864,
    'memory_bandwidth': 2040000000000,
    'cuda_compute_capability': '{ major: 8 feature_extension: NONE }',
    'core_count': 108,
    'fpus_per_core': 64,
    'clock_rate_ghz': 1.41,
    'shared_memory_per_core': 167936,
    'shared_memory_per_block_optin': 166912,
    'l2_cache_size': 41943040,
}
GPUS = {'h100': H100, 'h200': H100 | H200, 'a100': A100}


def description(kind: str) -> str:
    """Return a GpuTargetConfigProto as text."""
    fields = '\n  '.join(f'{name}: {value}' for name, value in GPUS[kind].items())
    return f"""
gpu_device_info {{
  {fields}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: {GPUS[kind]['name']}
"""


def devices(kind: str, sizes: tuple[int, ...]) -> Any:
    """Return abstract devices. sizes: (n,) for one machine, (machines, n) for several."""
    machines, count = sizes if len(sizes) == 2 else (1, sizes[0])
    return topologies.get_topology_desc(
        platform='cuda',
        topology_name='',
        target_config=description(kind),
        topology=f'1x{machines}x{count}',
    ).devices
