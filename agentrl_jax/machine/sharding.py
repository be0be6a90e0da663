"""The mesh and the partition rules: a list of (regex, PartitionSpec); the first match wins.

Batch rows are split over ('data', 'fsdp'). For training, parameters are split over 'fsdp' and
'tensor'; for rollouts over 'tensor' only, so that each shard of rows decodes independently.
"""

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.settings.marks import ONE, In

AXES = ('data', 'fsdp', 'tensor')
Rules = tuple[tuple[str, P], ...]

TRAIN_RULES: Rules = (
    (r'embed_tokens/embedding$', P('tensor', 'fsdp')),
    (r'lm_head/kernel$', P('fsdp', 'tensor')),
    (r'(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel$', P('fsdp', 'tensor')),
    (r'(q_proj|k_proj|v_proj)/bias$', P('tensor')),
    (r'(o_proj|down_proj)/kernel$', P('tensor', 'fsdp')),
    (r'(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_a$', P('fsdp')),
    (r'(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_b$', P(None, 'tensor')),
    (r'(o_proj|down_proj)/lora_a$', P('tensor')),
    (r'(o_proj|down_proj)/lora_b$', P(None, 'fsdp')),
    (r'(norm|layernorm)/scale$', P()),
    (r'value_head/(kernel|bias)$', P()),
)


def without(rules: Rules, axis: str) -> Rules:
    """The rules without one mesh axis: parameters are replicated over it."""
    return tuple(
        (pattern, P(*(None if part == axis else part for part in spec))) for pattern, spec in rules
    )


ROLLOUT_RULES = without(TRAIN_RULES, 'fsdp')


def head_parts(tensor: int, heads: int) -> int:
    """Number of parts that rollouts split heads into: `tensor` if it divides `heads`, else 1."""
    return tensor if heads % tensor == 0 else 1


def rollout_rules(mesh: Mesh, *, num_heads: int, num_kv_heads: int) -> Rules:
    """ROLLOUT_RULES, but projections are replicated if 'tensor' does not divide their heads.

    Otherwise the two halves of a rotary embedding would be on different devices. Each token would
    wait for a collective permute, which on CPUs includes devices that have finished their shard.
    """
    heads = {'q': num_heads, 'o': num_heads, 'k': num_kv_heads, 'v': num_kv_heads}
    copied = ''.join(name for name, n in heads.items() if head_parts(mesh.shape['tensor'], n) == 1)
    if mesh.shape['tensor'] == 1 or not copied:
        return ROLLOUT_RULES
    return ((rf'[{copied}]_proj/', P()), *ROLLOUT_RULES)


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence | None = None) -> Mesh:
    """Create the mesh of all devices. All meshes come from here (Auto axes: GSPMD does the rest).

    devices: the devices of a topology to compile for; None: the actual devices.
    """
    shape, count = (data, fsdp, tensor), jax.device_count() if devices is None else len(devices)
    if min(shape) < 1 or math.prod(shape) != count:
        raise ValueError(
            f'mesh data={data} x fsdp={fsdp} x tensor={tensor} does not match the '
            f'{count} available devices. Set --config.mesh.data, --config.mesh.fsdp and '
            f'--config.mesh.tensor to values with product {count}'
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def local_mesh(mesh: Mesh) -> Mesh:
    """The submesh of this process, which plays its rows independently."""
    if jax.process_count() == 1:
        return mesh
    local = np.vectorize(lambda device: device.process_index)(mesh.devices) == jax.process_index()
    places = [np.unique(axis) for axis in np.nonzero(local)]
    box = mesh.devices[np.ix_(*places)]
    if not local[np.ix_(*places)].all() or box.shape[2] != mesh.shape['tensor']:
        raise ValueError(
            f'mesh.tensor={mesh.shape["tensor"]} spans processes, but with environments on hosts '
            "each process plays its rows alone: choose a divisor of a process's number of devices"
        )
    return Mesh(box, mesh.axis_names, axis_types=mesh.axis_types)


def path_name(path: tuple) -> str:
    """Format a tree path: 'model/layers_0/mlp/up_proj/kernel'."""
    return '/'.join(str(getattr(key, 'key', getattr(key, 'name', key))) for key in path)


def _fit(spec: P, name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Drop axes from the spec that do not divide their dimension, and axes of one device.

    XLA returns specs without axes of one device. If they were kept, a resumed run would compile
    another program for validation than a new run, because its parameters come from an update.
    """
    if len(spec) > len(shape):
        raise ValueError(f'the partition rule {spec} has more axes than {name} of shape {shape}')
    parts = [
        axis if axis and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(spec, shape, strict=False)
    ]
    return P(*parts)


def specs(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """NamedSharding of every array of a tree (arrays or ShapeDtypeStructs).

    Scalars are replicated; every other array must match a rule. Optimiser moments in a TrainState
    get the layout of their parameters, because their paths contain the parameters' paths.
    """

    def one(path, leaf):
        name = path_name(path)
        if not leaf.ndim:
            return NamedSharding(mesh, P())
        for pattern, spec in rules:
            if re.search(pattern, name):
                return NamedSharding(mesh, _fit(spec, name, leaf.shape, mesh))
        raise ValueError(f'no partition rule matches the parameter {name}')

    return jax.tree_util.tree_map_with_path(one, tree)


def shard_rows(mesh: Mesh) -> NamedSharding:
    """Layout of arrays with batch rows as their first axis."""
    return NamedSharding(mesh, P(('data', 'fsdp')))


def row_shards(mesh: Mesh) -> int:
    """Number of parts that batch rows are split into."""
    return mesh.shape['data'] * mesh.shape['fsdp']


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Copy host arrays (equal on every process) to all devices."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def init_sharded(init: Callable, key: jax.Array, rules: Rules, mesh: Mesh) -> Any:
    """Compute init(key) directly in its layout, so no device ever holds the full result."""
    layout = specs(jax.eval_shape(init, key), rules, mesh)
    return jax.jit(init, out_shardings=layout)(key)


def abstract_of(tree: Any) -> Any:
    """Shapes, dtypes and layouts of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def with_layout(tree: Any, layout: Any) -> Any:
    """Shapes and dtypes with the given layouts: one for all arrays, or a tree of them."""

    def one(x, at):
        # NumPy's int64 is int32 on the device; jax 0.11.2 warns about it.
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=at)

    if isinstance(layout, jax.sharding.Sharding):
        return jax.tree.map(lambda x: one(x, layout), tree)
    return jax.tree.map(one, tree, layout)


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Devices: data x fsdp x tensor."""

    data: Annotated[int, In(low=1, also=(-1,))] = -1  # rows; -1 = all remaining devices
    fsdp: Annotated[int, ONE] = 1  # rows and parameters
    tensor: Annotated[int, ONE] = 1  # heads and hidden units


def check_no_empty_array(tree: Any, mesh: Mesh) -> None:
    """Raise ValueError if an input of a shard_map is empty: jaxlib 0.11.2 would crash."""
    if mesh.size == 1 or importlib.metadata.version('jaxlib') != '0.11.2':
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not np.size(leaf):
            raise ValueError(
                'jaxlib 0.11.2 crashes on empty arrays with several devices, and '
                f'{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}: give it one element, or '
                'install jax 0.11.1'
            )
