"""Machines that a program can be compiled for without having them, and what their chips can do.

TPU topologies come from libtpu (requirements/plan.txt), which compiles for slices it does not see,
GPUs from CUDA's compiler (requirements/plan-gpu.txt; gpus.py), which needs neither GPU nor driver.
Peaks are the vendors' published figures a chip: bfloat16 matrix products without sparsity. Sources:
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
    """One device of JAX. A TPU7x chip is two, each with half of its published figures."""

    memory: str  # as published
    usable: float  # bytes


# usable: what XLA's TPU compiler allows a program, as its own out-of-memory errors state it
# (libtpu 0.0.42).
TPU = {
    'v5e': Chip('16 GB', 15.75 * GIB),
    'v5p': Chip('95 GB', 95.74 * GIB),
    'v6e': Chip('32 GB', 31.25 * GIB),
    'tpu7x': Chip('96 GB', 94.75 * GIB),
}
TPU_FLOPS = {'v5e': 197e12, 'v5p': 459e12, 'v6e': 918e12, 'tpu7x': 2307e12 / 2}  # a second
GPU_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12}  # by a word of the device's name

FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # environment variable: of a GPU's memory, so much is
MEM_FRACTION = 0.75  # taken; by itself jax takes this

KINDS = {  # of TPUs, as JAX names them
    'TPU v5 lite': 'v5e',
    'TPU v5e': 'v5e',
    'TPU v5': 'v5p',
    'TPU v5p': 'v5p',
    'TPU v6 lite': 'v6e',
    'TPU v6e': 'v6e',
    'TPU7x': 'tpu7x',
}


def peak_flops(device: Any) -> float | None:
    """bfloat16 FLOP/s that the vendor publishes of a device; None where that is not known."""
    if device.device_kind in KINDS:
        return TPU_FLOPS[KINDS[device.device_kind]]
    words = device.device_kind.upper().replace('-', ' ').split()
    if {'PCIE', 'NVL'} & set(words):  # other boards differ, GH200 too
        return None
    return next((flops for name, flops in GPU_FLOPS.items() if name in words), None)


class NotInstalled(ValueError):
    """A package that compiles for this topology is missing."""


class Topology(NamedTuple):
    devices: Any
    chip: Chip


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """('v5e', (2, 4)) of 'v5e:2x4'."""
    axes = {'v5e': (2,), 'v6e': (2,), 'v5p': (3,), 'tpu7x': (3,), 'cpu': (1,), 'gpu': (1,)}
    axes |= dict.fromkeys(gpus.GPUS, (1, 2))
    match = re.fullmatch(rf'({"|".join(axes)}):(\d+(?:x\d+)*)', name)
    sizes = tuple(int(size) for size in match[2].split('x')) if match else ()
    if not match or len(sizes) not in axes[match[1]] or min(sizes) < 1:
        raise ValueError(
            f'topology {name!r} is not known: say v5e:2x4 or v6e:2x4 (two axes), v5p:2x2x1 '
            f'or tpu7x:2x2x1 (three), {":1, ".join(gpus.GPUS)}:1 (GPUs that need not be there; '
            'h100:2x8 are two machines of eight), cpu:8 or gpu:1 (a number of devices here)'
        )
    return match[1], sizes


def prepare(argv: list[str]) -> None:
    """Chooses JAX's backend for the --topology in argv; before anything else touches jax."""
    names = [word.partition('=')[2] for word in argv if re.match(r'--?topology=', word)]
    if not names:
        return  # the flag's own check will say so
    kind, sizes = parse(names[-1])
    if kind != 'gpu':
        jax.config.update('jax_platforms', 'cpu')
    if kind == 'cpu' or not compiles_for(kind):  # shapes are laid out over CPU devices (stand_ins)
        jax.config.update('jax_num_cpu_devices', count_devices(kind, sizes))


def count_devices(kind: str, sizes: tuple[int, ...]) -> int:
    """Devices of JAX in a topology of this many chips along each axis."""
    return math.prod(sizes) * (2 if kind == 'tpu7x' else 1)


def compiles_for(kind: str) -> bool:
    """Whether the package is there that compiles for a kind."""
    package = 'libtpu' if kind in TPU else gpus.PACKAGE if kind in gpus.GPUS else 'jax'
    return importlib.util.find_spec(package) is not None


def find(name: str) -> Topology:
    """The devices of a topology: abstract ones of a TPU slice, or those of this machine."""
    kind, sizes = parse(name)
    if kind in TPU:
        return Topology(_tpu_devices(name, sizes), TPU[kind])
    if kind in gpus.GPUS:
        return Topology(_gpu_devices(name, kind, sizes), chip(kind))
    return _cpu(sizes[0]) if kind == 'cpu' else _gpu(sizes[0])


def chip(kind: str) -> Chip:
    """Of a kind of TPU or GPU that need not be there."""
    if kind in TPU:
        return TPU[kind]
    memory = gpus.GPUS[kind].memory
    taken = float(os.environ.get(FRACTION) or MEM_FRACTION)
    return Chip(f'{memory / 1e9:.0f} GB', taken * memory)


def stand_ins(name: str) -> Topology:
    """A topology whose devices are those of the CPU (prepare): for shapes, not for compiling."""
    kind, sizes = parse(name)
    return Topology(jax.devices('cpu')[: count_devices(kind, sizes)], chip(kind))


def _gpu_devices(name: str, kind: str, sizes: tuple[int, ...]) -> Any:
    if not compiles_for(kind):
        raise NotInstalled(
            f"topology {name!r} needs CUDA's compiler and libraries, no GPU and no driver (Linux, "
            f'x86-64): pip install --no-deps -r {gpus.REQUIREMENTS}'
        )
    try:
        return gpus.devices(kind, sizes)
    except (RuntimeError, ImportError, ValueError) as error:
        raise ValueError(f'topology {name!r}: {error}') from error


def _tpu_devices(name: str, sizes: tuple[int, ...]) -> Any:
    # There is no metadata server to ask, and several plans may compile at the same time.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    single = {'chips_per_host_bounds': [1, 1, 1]} if max(sizes) == 1 else {}
    try:
        return topologies.get_topology_desc(platform='tpu', topology_name=name, **single).devices
    except (RuntimeError, ImportError, ValueError) as error:
        if compiles_for('v5e'):
            raise ValueError(f'topology {name!r}: {error}') from error
        raise NotInstalled(
            f'topology {name!r} needs libtpu (Linux, x86-64): pip install -r requirements/plan.txt'
        ) from error


def _cpu(count: int) -> Topology:
    devices = jax.devices('cpu')
    if len(devices) < count:
        raise ValueError(
            f'topology cpu:{count}: jax runs with {len(devices)} CPU devices; set '
            f'jax_num_cpu_devices to {count} before it starts'
        )
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / count
    return Topology(devices[:count], Chip(f'{memory / 1e9:.1f} GB', memory))


def _gpu(count: int) -> Topology:
    try:
        devices = jax.devices('gpu')
    except RuntimeError as error:
        raise ValueError(
            f'topology gpu:{count} needs a GPU and a jax that sees it (pip install "jax[cuda13]"): '
            f'{error}'
        ) from error
    if len(devices) < count:
        raise ValueError(f'topology gpu:{count}: there are {len(devices)} GPUs')
    usable = devices[0].memory_stats()['bytes_limit']
    return Topology(devices[:count], Chip(devices[0].device_kind, usable))
