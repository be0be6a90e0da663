"""LoRA: trained low-rank corrections to the kernels of a frozen model (arXiv:2106.09685).

x W becomes x W + s (x A) B with A [in, rank], B [rank, out] and s = alpha / rank. Adapters are a
separate tree, params['lora'], with the same paths as the kernels in params['model'].

Model.forward *applies* them as two thin products per kernel, so only A and B have gradients.
A gradient through `merge` would also compute and store kernel gradients and corrected copies of
kernels. Sampling uses `merge`, once for all tokens of a rollout.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import traverse_util

from agentrl_jax.settings.marks import POSITIVE, ZERO
from agentrl_jax.types import Params

ATTENTION = ('q_proj', 'k_proj', 'v_proj', 'o_proj')
TARGETS = (*ATTENTION, 'gate_proj', 'up_proj', 'down_proj')
ALL = 'all-linear'


def target_names(targets: str) -> tuple[str, ...]:
    """Return the names in 'all-linear' or in a comma-separated list of TARGETS."""
    if targets == ALL:
        return TARGETS
    names = tuple(name.strip() for name in targets.split(','))
    if len(set(names)) < len(names) or not set(names) <= set(TARGETS):
        raise ValueError(
            f'lora.targets={targets!r} must be {ALL!r} or different names of '
            f'{", ".join(TARGETS)}, separated by commas'
        )
    return names


def init(key: jax.Array, model: Params, *, rank: int, targets: tuple[str, ...]) -> Params:
    """Return float32 adapters for params['model'] with B = 0, which leave the model unchanged.

    A is uniform in +-1 / sqrt(in), as in PEFT and the paper's code.
    """
    kernels = traverse_util.flatten_dict(model)
    chosen = sorted(path for path in kernels if path[-1] == 'kernel' and path[-2] in targets)
    adapters = {}
    for i, path in enumerate(chosen):
        width, features = kernels[path].shape
        bound, where = width**-0.5, path[:-1]
        adapters[*where, 'lora_a'] = jax.random.uniform(
            jax.random.fold_in(key, i), (width, rank), jnp.float32, -bound, bound
        )
        adapters[*where, 'lora_b'] = jnp.zeros((rank, features), jnp.float32)
    return traverse_util.unflatten_dict(adapters)


def merge(params: Params, scale: float) -> Params:
    """Merge the adapters into the kernels: W + scale A B in float32."""
    if 'lora' not in params:
        return params
    kernels = traverse_util.flatten_dict(params['model'])
    adapters = traverse_util.flatten_dict(params['lora'])
    for where in sorted({path[:-1] for path in adapters}):  # every process must trace the same
        a, b = adapters[*where, 'lora_a'], adapters[*where, 'lora_b']
        # On a TPU the default precision of a product is below float32, and W must keep float32
        kernels[*where, 'kernel'] += scale * jnp.matmul(a, b, precision='highest')
    rest = {name: part for name, part in params.items() if name != 'lora'}
    return {**rest, 'model': traverse_util.unflatten_dict(kernels)}


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (RAGEN: rank 64, lr 1e-5, critic_lr 1e-4)."""

    rank: Annotated[int, ZERO] = 0  # of trained corrections to the frozen kernels; 0 = train all
    # parameters
    alpha: Annotated[float, POSITIVE] = 64.0  # corrections are scaled by alpha / rank
    targets: str = 'all-linear'  # or some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,...

    def __post_init__(self):
        target_names(self.targets)  # raises

    @property
    def scale(self) -> float:
        """Scale of the corrections."""
        return self.alpha / self.rank if self.rank else 1.0
