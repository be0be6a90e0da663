"""The mesh and who holds what: partition rules are data, (regex, PartitionSpec), first match wins.

Rows of a batch are split over ('data', 'fsdp'). For training parameters are split over 'fsdp' and
'tensor'; for rollouts over 'tensor' only, so that a shard decodes without waiting for the others.
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
    """The rules with one mesh axis left out: parameters are replicated over it."""
    return tuple(
        (pattern, P(*(None if part == axis else part for part in spec))) for pattern, spec in rules
    )


ROLLOUT_RULES = without(TRAIN_RULES, 'fsdp')


def head_parts(tensor: int, heads: int) -> int:
    """Number of parts that rollouts split heads into: `tensor` if that divides them, else one."""
    return tensor if heads % tensor == 0 else 1


def rollout_rules(mesh: Mesh, *, num_heads: int, num_kv_heads: int) -> Rules:
    """ROLLOUT_RULES with heads that 'tensor' does not divide on every device.

    The halves that rotary embeddings turn against each other would lie on two: each token would
    wait for a collective permute, which on CPUs all devices must join, those too whose shard is
    done.
    """
    heads = {'q': num_heads, 'o': num_heads, 'k': num_kv_heads, 'v': num_kv_heads}
    whole = ''.join(name for name, n in heads.items() if head_parts(mesh.shape['tensor'], n) == 1)
    if mesh.shape['tensor'] == 1 or not whole:
        return ROLLOUT_RULES
    return ((rf'[{whole}]_proj/', P()), *ROLLOUT_RULES)


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence | None = None) -> Mesh:
    """Mesh of all devices; the only place that makes one (axes are Auto: GSPMD places the rest).

    devices: those of a topology that is only compiled for; None = those there are.
    """
    shape, count = (data, fsdp, tensor), jax.device_count() if devices is None else len(devices)
    if min(shape) < 1 or math.prod(shape) != count:
        raise ValueError(
            f'mesh data={data} x fsdp={fsdp} x tensor={tensor} does not use exactly the '
            f'{count} devices there are; with --config.mesh.data, --config.mesh.fsdp and '
            f'--config.mesh.tensor any three whose product is {count} will do'
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def local_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh that this process has: its rows are played without the others."""
    if jax.process_count() == 1:
        return mesh
    own = np.vectorize(lambda device: device.process_index)(mesh.devices) == jax.process_index()
    places = [np.unique(axis) for axis in np.nonzero(own)]
    box = mesh.devices[np.ix_(*places)]
    if not own[np.ix_(*places)].all() or box.shape[2] != mesh.shape['tensor']:
        raise ValueError(
            f'mesh.tensor={mesh.shape["tensor"]} spans processes, and rollouts against hosts play '
            'the rows of a process on its own devices: choose a divisor of the devices of a process'
        )
    return Mesh(box, mesh.axis_names, axis_types=mesh.axis_types)


def path_name(path: tuple) -> str:
    """'model/layers_0/mlp/up_proj/kernel' of a tree path."""
    return '/'.join(str(getattr(key, 'key', getattr(key, 'name', key))) for key in path)


def _fit(spec: P, name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without axes that do not divide their dimension, and without axes of one device.

    XLA returns specs without the latter. A resumed run whose first validation takes parameters from
    an update would otherwise compile another program than a fresh one.
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

    Scalars are whole on every device; any other array must match a rule. In a TrainState moments
    lie as their parameters, whose paths are parts of theirs.
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
    """Layout of arrays whose first axis are rows of a batch."""
    return NamedSharding(mesh, P(('data', 'fsdp')))


def row_shards(mesh: Mesh) -> int:
    """Number of parts that rows are split into."""
    return mesh.shape['data'] * mesh.shape['fsdp']


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Host arrays (equal on every process) onto all devices."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def init_sharded(init: Callable, key: jax.Array, rules: Rules, mesh: Mesh) -> Any:
    """init(key) computed where its results belong: no device ever holds the whole."""
    layout = specs(jax.eval_shape(init, key), rules, mesh)
    return jax.jit(init, out_shardings=layout)(key)


def abstract_of(tree: Any) -> Any:
    """Shapes, dtypes and layouts of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def with_layout(tree: Any, layout: Any) -> Any:
    """Shapes and dtypes with one layout for all arrays, or with a tree of layouts."""

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

    data: Annotated[int, In(low=1, also=(-1,))] = -1  # rows; -1 = all devices that remain
    fsdp: Annotated[int, ONE] = 1  # rows and parameters
    tensor: Annotated[int, ONE] = 1  # heads and hidden units


def check_no_empty_array(tree: Any, mesh: Mesh) -> None:
    """Raise ValueError for an empty input of a shard_map: jaxlib 0.11.2 would crash on it."""
    if mesh.size == 1 or importlib.metadata.version('jaxlib') != '0.11.2':
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not np.size(leaf):
            raise ValueError(
                'jaxlib 0.11.2 crashes on empty arrays with several devices, and '
                f'{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}: give it one element, or '
                'install jax 0.11.1'
            )
