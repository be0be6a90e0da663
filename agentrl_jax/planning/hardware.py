"""Topologies that programs can be compiled for without the hardware, and peak figures of chips.

libtpu (requirements/plan.txt) compiles for TPU slices that are not attached. CUDA's compiler
(requirements/plan-gpu.txt; gpus.py) compiles for GPUs without a GPU or a driver. Peaks are the
vendors' published bfloat16 figures per chip, for matrix products without sparsity. Sources:
docs.cloud.google.com/tpu/docs pages v5e, v5p, v6e, tpu7x; NVIDIA's A100, H100 and H200 data sheets
(SXM).
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from agentrl_jax.planning import gpus

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device. A TPU7x chip is two devices, each with half of the published figures."""

    memory: str  # as published
    usable: float  # bytes


# usable: the limit stated in the out-of-memory errors of XLA's TPU compiler (libtpu 0.0.42).
TPU = {
    'v5e': Chip('16 GB', 15.75 * GIB),
    'v5p': Chip('95 GB', 95.74 * GIB),
    'v6e': Chip('32 GB', 31.25 * GIB),
    'tpu7x': Chip('96 GB', 94.75 * GIB),
}
TPU_FLOPS = {'v5e': 197e12, 'v5p': 459e12, 'v6e': 918e12, 'tpu7x': 2307e12 / 2}  # per second
GPU_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12}  # keyed by a word in the device's name

FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # variable: fraction of GPU memory that jax allocates
MEM_FRACTION = 0.75  # jax's default

KINDS = {  # JAX's device_kind -> TPU
    'TPU v5 lite': 'v5e',
    'TPU v5e': 'v5e',
    'TPU v5': 'v5p',
    'TPU v5p': 'v5p',
    'TPU v6 lite': 'v6e',
    'TPU v6e': 'v6e',
    'TPU7x': 'tpu7x',
}


def peak_flops(device: Any) -> float | None:
    """Return the vendor's published bfloat16 FLOP/s of a device; None if unknown."""
    if device.device_kind in KINDS:
        return TPU_FLOPS[KINDS[device.device_kind]]
    words = device.device_kind.upper().replace('-', ' ').split()
    if {'PCIE', 'NVL'} & set(words):  # these boards have other peaks, as does GH200
        return None
    return next((flops for name, flops in GPU_FLOPS.items() if name in words), None)


class NotInstalled(ValueError):
    """The package that compiles for this topology is not installed."""


class Topology(NamedTuple):
    devices: Any
    chip: Chip


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """Parse 'v5e:2x4' as ('v5e', (2, 4))."""
    axes = {'v5e': (2,), 'v6e': (2,), 'v5p': (3,), 'tpu7x': (3,), 'cpu': (1,), 'gpu': (1,)}
    axes |= dict.fromkeys(gpus.GPUS, (1, 2))
    match = re.fullmatch(rf'({"|".join(axes)}):(\d+(?:x\d+)*)', name)
    sizes = tuple(int(size) for size in match[2].split('x')) if match else ()
    if not match or len(sizes) not in axes[match[1]] or min(sizes) < 1:
        raise ValueError(
            f'topology {name!r} is not known. Use v5e:2x4 or v6e:2x4 (two axes), v5p:2x2x1 '
            f'or tpu7x:2x2x1 (three axes), {":1, ".join(gpus.GPUS)}:1 (GPUs, not needed here; '
            'h100:2x8 is two machines of eight), cpu:8 or gpu:1 (devices of this machine)'
        )
    return match[1], sizes


def prepare(argv: list[str]) -> None:
    """Set JAX's backend for the --topology in argv. Call it before anything else uses jax."""
    names = [word.partition('=')[2] for word in argv if re.match(r'--?topology=', word)]
    if not names:
        return  # argument parsing reports it
    kind, sizes = parse(names[-1])
    if kind != 'gpu':
        jax.config.update('jax_platforms', 'cpu')
    if kind == 'cpu' or not compiles_for(kind):  # shapes are placed on CPU devices (stand_ins)
        jax.config.update('jax_num_cpu_devices', count_devices(kind, sizes))


def count_devices(kind: str, sizes: tuple[int, ...]) -> int:
    """Return the number of JAX devices in a topology with `sizes` chips along its axes."""
    return math.prod(sizes) * (2 if kind == 'tpu7x' else 1)


def compiles_for(kind: str) -> bool:
    """Return whether the package that compiles for `kind` is installed."""
    package = 'libtpu' if kind in TPU else gpus.PACKAGE if kind in gpus.GPUS else 'jax'
    return importlib.util.find_spec(package) is not None


def find(name: str) -> Topology:
    """Return a topology: abstract TPU or GPU devices, or devices of this machine."""
    kind, sizes = parse(name)
    if kind in ('cpu', 'gpu'):
        return _attached(kind, sizes[0])
    if not compiles_for(kind):
        needs = (
            f"CUDA's compiler and libraries, but no GPU or driver (Linux, x86-64): pip install "
            f'--no-deps -r {gpus.REQUIREMENTS}'
            if kind in gpus.GPUS
            else 'libtpu (Linux, x86-64): pip install -r requirements/plan.txt'
        )
        raise NotInstalled(f'topology {name!r} needs {needs}')
    try:
        devices = gpus.devices(kind, sizes) if kind in gpus.GPUS else _tpu_devices(name, sizes)
    except (RuntimeError, ImportError, ValueError) as error:
        raise ValueError(f'topology {name!r}: {error}') from error
    return Topology(devices, chip(kind))


def chip(kind: str) -> Chip:
    """Return the memory figures of a kind of TPU or GPU, which need not be attached."""
    if kind in TPU:
        return TPU[kind]
    memory = gpus.GPUS[kind]['device_memory_size']
    fraction = float(os.environ.get(FRACTION) or MEM_FRACTION)
    return Chip(f'{memory / 1e9:.0f} GB', fraction * memory)


def stand_ins(name: str) -> Topology:
    """Return a topology of CPU devices (see prepare): for shapes, not for compiling."""
    kind, sizes = parse(name)
    return Topology(jax.devices('cpu')[: count_devices(kind, sizes)], chip(kind))


def _tpu_devices(name: str, sizes: tuple[int, ...]) -> Any:
    # There is no metadata server, and several plans may compile at the same time.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    single = {'chips_per_host_bounds': [1, 1, 1]} if max(sizes) == 1 else {}
    return topologies.get_topology_desc(platform='tpu', topology_name=name, **single).devices


def _attached(kind: str, count: int) -> Topology:
    try:
        devices = jax.devices(kind)
    except RuntimeError as error:
        raise ValueError(
            f'topology gpu:{count} needs a GPU and jax with CUDA (pip install "jax[cuda13]"): '
            f'{error}'
        ) from error
    if len(devices) < count:
        raise ValueError(
            f'topology {kind}:{count}: jax runs with {len(devices)} such devices. Choose fewer, or '
            'set jax_num_cpu_devices before jax starts'
        )
    if kind == 'gpu':
        chip = Chip(devices[0].device_kind, devices[0].memory_stats()['bytes_limit'])
    else:
        memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / count
        chip = Chip(f'{memory / 1e9:.1f} GB', memory)
    return Topology(devices[:count], chip)
