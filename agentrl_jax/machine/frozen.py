"""Parameters that are saved once and loaded later: base models, references and clones."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.machine import checkpoint, sharding
from agentrl_jax.types import Params


def keep(folder: Path, params: Params) -> None:
    """Save the parameters in the folder. Raises ValueError if it already holds different ones."""
    ckpts = checkpoint.open_checkpoints(folder, keep=1)
    stored = checkpoint.save(ckpts, 0, {'params': params}, {})
    checkpoint.close(ckpts)
    if not stored and not jax.jit(equal)(load(folder, sharding.abstract_of(params)), params):
        raise ValueError(
            f'{folder} holds the parameters of another run, which ended before its first '
            'checkpoint; remove the folder'
        )


def load(folder: Path, abstract: Params) -> Params:
    """Load the parameters from the folder with the layout of `abstract`."""
    return checkpoint.load_params_only(folder, abstract)


def equal(one: Any, other: Any) -> jax.Array:
    """Whether all arrays of two trees are equal, bool []."""
    same = jax.tree.map(lambda a, b: (a == b).all(), one, other)
    return jnp.stack(jax.tree.leaves(same)).all()
