"""Run the layers of a model as one loop, so that its program contains a single layer.

Parameters are stored layer by layer and stacked inside the program, in the compute dtype.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.machine import sharding
from agentrl_jax.types import Params


def run(
    layer: Callable[[Params, jax.Array], jax.Array],
    layers: Sequence[Params],
    x: jax.Array,
    *,
    dtype: str,
    remat: bool,
    mesh: Mesh | None,
) -> jax.Array:
    """Apply layer(variables, x) for the variables of each layer in turn; return the last x.

    On a mesh each layer's parameters and gradients keep their training layout up to the products
    inside the loop, so at most one layer is gathered at a time.
    """
    layout = None if mesh is None else sharding.specs(layers[0], sharding.TRAIN_RULES, mesh)

    def split(tree, *, stacked):
        if mesh is None:
            return tree
        at = jax.tree.map(lambda s: NamedSharding(mesh, P(*[None] * stacked, *s.spec)), layout)
        return jax.lax.with_sharding_constraint(tree, at)

    def body(x, variables):
        return layer(split(variables, stacked=False), x), None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # the loop already separates the passes
    stacked = jax.tree.map(lambda *each: jnp.stack([x.astype(dtype) for x in each]), *layers)
    return jax.lax.scan(body, x, split(stacked, stacked=True))[0]
