"""Descriptions of GPUs that let XLA compile for one that is not attached.

Figures: openxla/xla, xla/backends/gpu/target_config/specs (h100_sxm, h200, a100_sxm_80).
"""

import dataclasses
from typing import Any

from jax.experimental import topologies

PACKAGE, REQUIREMENTS = 'jax_cuda13_plugin', 'requirements/plan-gpu.txt'


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Properties that differ between the supported GPUs."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes/s
    major: int  # compute capability
    extension: str  # whether architecture-specific instructions may be used (sm_90a)
    cores: int
    units_per_core: int
    clock_ghz: float
    shared_per_core: int  # bytes
    shared_per_block: int  # bytes; the maximum that a block may request
    l2: int  # bytes


H100 = Gpu(
    name='NVIDIA H100 80GB HBM3',
    memory=84942979072,
    bandwidth=3.35e12,
    major=9,
    extension='ACCELERATED_FEATURES',
    cores=132,
    units_per_core=128,
    clock_ghz=1.98,
    shared_per_core=233472,
    shared_per_block=232448,
    l2=52428800,
)
GPUS = {
    'h100': H100,
    'h200': dataclasses.replace(
        H100, name='NVIDIA H200 141GB HBM3e', memory=151397597184, bandwidth=4.8e12
    ),
    'a100': Gpu(
        name='NVIDIA A100-SXM4-80GB',
        memory=85100068864,
        bandwidth=2.04e12,
        major=8,
        extension='NONE',
        cores=108,
        units_per_core=64,
        clock_ghz=1.41,
        shared_per_core=167936,
        shared_per_block=166912,
        l2=41943040,
    ),
}


def description(gpu: Gpu) -> str:
    """Return a GpuTargetConfigProto as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  cuda_compute_capability {{ major: {gpu.major} feature_extension: {gpu.extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  name: "{gpu.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def devices(kind: str, sizes: tuple[int, ...]) -> Any:
    """Return abstract devices. sizes: (n,) for one machine, (machines, n) for several."""
    machines, count = sizes if len(sizes) == 2 else (1, sizes[0])
    return topologies.get_topology_desc(
        platform='cuda',
        topology_name='',
        target_config=description(GPUS[kind]),
        topology=f'1x{machines}x{count}',
    ).devices
